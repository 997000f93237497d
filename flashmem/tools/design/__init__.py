"""Design of an application: which model, in which precision, on which device, with how much memory, for each of its tasks.

The method is CARIn's (Panopoulos et al., 2024). `application.py` reads what is asked for, `profiles.py` finds what each
candidate takes, `metrics.py` puts candidates together into decisions and gives their metrics, `rass.py` solves the problem
once and picks designs and the policy that switches between them, and `written.py` compiles and writes them. What a device needs
at run time is in `flashmem.runtime`: `designs.py`, `watch.py` and `manager.py`.
"""
