// Inclusive running sum of a block: every thread adds what stands 1, 2, 4, ... places before it.
extern "C" __global__ void running_sum(const int *x, int *out) {
    __shared__ int buffer[2][128];
    int at = threadIdx.x, side = 0;
    buffer[side][at] = x[blockIdx.x * 128 + at];
    __syncthreads();
    for (int step = 1; step < 128; step *= 2) {
        int value = buffer[side][at];
        if (at >= step) value += buffer[side][at - step];
        side ^= 1;
        buffer[side][at] = value;
        __syncthreads();
    }
    out[blockIdx.x * 128 + at] = buffer[side][at];
}

// Keep the positive elements of every block, in their order, and count them.
extern "C" __global__ void keep_positive(const int *x, int *out, int *counts, int n) {
    __shared__ int starts[33];
    int at = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32;
    bool keep = at < n && x[at] > 0;
    unsigned ballot = __ballot_sync(0xffffffffu, keep);
    if (lane == 0) starts[threadIdx.x / 32 + 1] = __popc(ballot);
    if (threadIdx.x == 0) starts[0] = 0;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int warp = 0; warp < blockDim.x / 32; ++warp) starts[warp + 1] += starts[warp];
        counts[blockIdx.x] = starts[blockDim.x / 32];
    }
    __syncthreads();
    int before = __popc(ballot & ((1u << lane) - 1));
    if (keep) out[blockIdx.x * blockDim.x + starts[threadIdx.x / 32] + before] = x[at];
}
