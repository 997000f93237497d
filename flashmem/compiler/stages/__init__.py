"""The stages of the compiler, from a model's file to packed weights: each makes one named result of those before."""
