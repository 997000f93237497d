"""`flashmem doctor`: diagnosis of OpenCL on this machine, and the commands that repair it."""
