"""From kernels to machine code: objects, host libraries, cubins, and their caches."""
