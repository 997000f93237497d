"""An interpreter of OpenCL C in NumPy: what a kernel's text says, computed without any driver's compiler.

It executes chosen work-groups of one launch, all work-items in lockstep, and bounds the rounding error of each number
(`values`). The runtime compares what a driver makes of the same text with it (`flashmem.runtime.checking`).

    preprocessor   text -> tokens, macros expanded
    syntax         tokens -> functions, as trees
    values         numbers of all work-items, with their type and an error bound
    functions      OpenCL's built-in functions on them
    memory         buffers, textures and arrays; pointers
    compiled       trees -> Python closures
    machine        one launch: arguments in, memory out

It knows the part of OpenCL C that kernels of flashmem use, and refuses the rest by an `UnknownTextError`.
"""
