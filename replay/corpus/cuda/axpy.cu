// y = a * x + y, four elements a thread where there are four, the rest one by one.
template <typename T>
__device__ T scaled(T a, T x, T y) { return a * x + y; }

extern "C" __global__ void axpy(float a, const float4 *__restrict__ x, float4 *y, int n) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (4 * at + 3 < n) {
        float4 u = x[at], v = y[at];
        y[at] = make_float4(scaled(a, u.x, v.x), scaled(a, u.y, v.y), scaled(a, u.z, v.z),
                            scaled(a, u.w, v.w));
        return;
    }
    const float *u = reinterpret_cast<const float *>(x);
    float *v = reinterpret_cast<float *>(y);
    for (int i = 4 * at; i < n; ++i) v[i] = scaled(a, u[i], v[i]);
}
