#pragma once
// Functions that the host and kernels call are marked CF_HD.

#ifdef __CUDACC__
#define CF_HD __host__ __device__
#else
#define CF_HD
#endif
