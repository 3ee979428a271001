"""After a failure: what ran out, in which phase, who held the memory, and which remedy fits (`memledger oom`)."""
