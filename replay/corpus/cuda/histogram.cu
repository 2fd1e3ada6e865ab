// Counts by value: atomics in shared memory first, one atomic to global memory for each bin.
extern "C" __global__ void histogram(const unsigned char *x, unsigned *counts, int n) {
    __shared__ unsigned bins[256];
    for (int bin = threadIdx.x; bin < 256; bin += blockDim.x) bins[bin] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        atomicAdd(&bins[x[i]], 1u);
    __syncthreads();
    for (int bin = threadIdx.x; bin < 256; bin += blockDim.x)
        if (bins[bin]) atomicAdd(&counts[bin], bins[bin]);
}

// The position of the largest value, the first of equals: packed in 64 bits and compared and swapped.
extern "C" __global__ void argmax(const float *x, unsigned long long *best, int n) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= n) return;
    unsigned bits = __float_as_uint(x[at]);
    unsigned key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    unsigned long long mine = (unsigned long long)key << 32 | (0xffffffffu - at);
    unsigned long long old = *best;
    while (mine > old) {
        unsigned long long seen = atomicCAS(best, old, mine);
        if (seen == old) break;
        old = seen;
    }
}
