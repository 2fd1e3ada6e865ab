// Sums over a block: within warps by shuffles, between warps through shared memory.
__device__ float warp_sum(float value) {
    for (int step = 16; step > 0; step >>= 1) value += __shfl_down_sync(0xffffffffu, value, step);
    return value;
}

extern "C" __global__ void row_sums(const float *x, float *out, int columns) {
    __shared__ float parts[32];
    float total = 0;
    for (int j = threadIdx.x; j < columns; j += blockDim.x)
        total += x[blockIdx.x * columns + j];
    total = warp_sum(total);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = total;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    total = threadIdx.x < (blockDim.x + 31) / 32 ? parts[threadIdx.x] : 0;
    total = warp_sum(total);
    if (threadIdx.x == 0) out[blockIdx.x] = total;
}

// The norm of float64 numbers in one block, by fused products; exact for small integers.
extern "C" __global__ void norm64(const double *x, double *out, long long n) {
    extern __shared__ double tree[];
    double total = 0;
    for (long long i = threadIdx.x; i < n; i += blockDim.x) total = fma(x[i], x[i], total);
    tree[threadIdx.x] = total;
    for (unsigned width = blockDim.x / 2; width > 0; width >>= 1) {
        __syncthreads();
        if (threadIdx.x < width) tree[threadIdx.x] += tree[threadIdx.x + width];
    }
    if (threadIdx.x == 0) *out = sqrt(tree[0]);
}
