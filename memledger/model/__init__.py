"""From an architecture to bytes: weights, KV cache per token, recurrent state per slot, and how each engine sizes its pools."""
