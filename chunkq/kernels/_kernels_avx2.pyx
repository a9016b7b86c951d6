include "_kernels.pyx"
