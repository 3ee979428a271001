"""memledger: where the GPU memory of an SGLang or vLLM server went, and whether the workload needs it there."""

__version__ = "0.1.0"
