"""A server watched over time: moments, recordings of them, growth, and the views of `memledger watch`."""
