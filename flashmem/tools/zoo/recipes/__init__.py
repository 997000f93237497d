"""Recipes of the zoo, one module for each family of architectures: configurations and corrections of the weights."""
