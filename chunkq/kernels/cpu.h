/* Which instruction sets this CPU has and this operating system saves. */
#ifndef CHUNKQ_CPU_H
#define CHUNKQ_CPU_H

#if defined(__x86_64__) || defined(_M_X64)
#ifdef _MSC_VER
#include <intrin.h>
static void cq_cpuid(int leaf, int r[4]) { __cpuidex(r, leaf, 0); }
static unsigned long long cq_xcr0(void) { return _xgetbv(0); }
#else
#include <cpuid.h>
static void cq_cpuid(int leaf, int r[4]) { __cpuid_count(leaf, 0, r[0], r[1], r[2], r[3]); }
static unsigned long long cq_xcr0(void) {
    unsigned lo, hi;
    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    return ((unsigned long long)hi << 32) | lo;
}
#endif

static int cq_has_avx2(void) {
    int r[4];
    cq_cpuid(0, r);
    if (r[0] < 7) return 0;
    cq_cpuid(1, r);
    const int wanted = (1 << 27) | (1 << 28) | (1 << 29); /* OSXSAVE, AVX, F16C */
    if ((r[2] & wanted) != wanted) return 0;
    if ((cq_xcr0() & 6) != 6) return 0; /* the system saves XMM and YMM */
    cq_cpuid(7, r);
    return (r[1] >> 5) & 1;
}
#else
static int cq_has_avx2(void) { return 0; }
#endif

#endif
