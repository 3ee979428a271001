"""A real vLLM server on the CPU, for `tests/test_live_vllm.py`."""
