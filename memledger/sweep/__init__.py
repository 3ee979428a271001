"""Raising context and concurrency on a running server, and what moves with it (`memledger sweep`)."""
