"""`flashmem doctor`: why OpenCL does or does not work on this machine, and what to type next."""
