// Two 16-bit numbers in one register.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

extern "C" __global__ void half_pairs(const __half2 *x, const __half2 *y, __half2 *out, int pairs) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < pairs) out[at] = __hmax2(__hfma2(x[at], y[at], x[at]), __hneg2(y[at]));
}

extern "C" __global__ void brain_pairs(const __nv_bfloat162 *x, const __nv_bfloat162 *y,
                                       __nv_bfloat162 *out, int pairs) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < pairs) out[at] = __hfma2(x[at], y[at], x[at]);
}

extern "C" __global__ void convert_pairs(const float2 *x, __half2 *half, __nv_bfloat162 *brain,
                                         int pairs) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= pairs) return;
    half[at] = __float22half2_rn(x[at]);
    brain[at] = __float22bfloat162_rn(x[at]);
}
