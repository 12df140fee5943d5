"""CPU kernels of the serving engine: a compiled library per instruction set, built once, called through ctypes; and for
a GPU `triton_kernels.py`, which only its runner imports. Torch-free.

Every output element is one fixed sequence of operations on its own row: its bits depend neither on the number of rows,
nor on the tile a row falls into, nor on the number of threads.
"""
