/* What is needed of OpenMP, and what stands for it in a build without. */
#ifndef CHUNKQ_THREADS_H
#define CHUNKQ_THREADS_H

#ifdef _OPENMP
#include <omp.h>
#define CQ_OPENMP _OPENMP
static inline double cq_seconds(void) { return omp_get_wtime(); }
/* End this thread's idle team (OpenMP 5.0). Without it a forked child hangs in its first parallel region, and
   idle threads spin for milliseconds after a long one. Returns 1 where the call exists. */
static inline int cq_pause_threads(void) {
#if _OPENMP >= 201811 || (defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 9)
    omp_pause_resource(omp_pause_soft, omp_get_initial_device());
    return 1;
#else
    return 0;
#endif
}
#else
#define CQ_OPENMP 0
static inline double cq_seconds(void) { return 0.0; }
static inline int cq_pause_threads(void) { return 1; }
#endif

#endif
