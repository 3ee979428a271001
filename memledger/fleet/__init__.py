"""`memledger fleet`: thousands of logs to one row per rank, by local processes or on Ray."""
