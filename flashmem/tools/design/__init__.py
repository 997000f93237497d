"""Design of an application: the model, precision, device and memory budget for each of its tasks.

The method is CARIn's (Panopoulos et al., 2024). `application.py` reads the requirements, `profiles.py` measures each candidate,
`metrics.py` combines candidates into decisions and computes their metrics. `rass.py` solves the problem: it selects designs and
the policy that switches between them. `writer.py` compiles and writes them. The runtime part is `flashmem.runtime.application`.
"""
