"""The running machine: NVML, processes and the server's own endpoints, each answered or said to be unavailable."""
