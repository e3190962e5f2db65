"""From a name, a folder, a file or a model in memory to a HookedTransformer."""
