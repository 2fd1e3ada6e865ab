// A tile is turned in shared memory, padded so that neither side conflicts; blocks of two dimensions.
extern "C" __global__ void transpose(const float *x, float *out, int rows, int columns) {
    __shared__ float tile[16][17];
    int j = blockIdx.x * 16 + threadIdx.x, i = blockIdx.y * 16 + threadIdx.y;
    if (i < rows && j < columns) tile[threadIdx.y][threadIdx.x] = x[i * columns + j];
    __syncthreads();
    j = blockIdx.x * 16 + threadIdx.y, i = blockIdx.y * 16 + threadIdx.x;
    if (i < rows && j < columns) out[j * rows + i] = tile[threadIdx.x][threadIdx.y];
}

// Copies that go to shared memory on their own, sixteen bytes each.
#include <cuda_pipeline.h>
extern "C" __global__ void reverse_rows(const int4 *x, int4 *out) {
    __shared__ int4 row[64];
    __pipeline_memcpy_async(&row[threadIdx.x], &x[blockIdx.x * 64 + threadIdx.x], sizeof(int4));
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncthreads();
    int4 v = row[63 - threadIdx.x];
    out[blockIdx.x * 64 + threadIdx.x] = make_int4(v.w, v.z, v.y, v.x);
}
