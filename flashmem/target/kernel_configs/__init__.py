"""Kernel configs: one class for each kind of kernel, with the numbers that its template needs and the cost of a workload."""
