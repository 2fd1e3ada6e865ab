// AdamW over many tensors: addresses and sizes travel in a structure that is passed by value.
struct Tensors {
    float *params[4];
    const float *grads[4];
    float *exp_avgs[4];
    float *exp_avg_sqs[4];
    int sizes[4];
};

extern "C" __global__ void adamw(Tensors list, float lr, float b1, float b2, float k1, float k2,
                                 float eps, float wd) {
    int tensor = blockIdx.y, n = list.sizes[tensor];
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        float p = list.params[tensor][i], g = list.grads[tensor][i];
        float m = b1 * list.exp_avgs[tensor][i] + (1.0f - b1) * g;
        float v = b2 * list.exp_avg_sqs[tensor][i] + (1.0f - b2) * g * g;
        list.exp_avgs[tensor][i] = m;
        list.exp_avg_sqs[tensor][i] = v;
        list.params[tensor][i] = p - lr * ((m / k1) / (sqrtf(v / k2) + eps) + wd * p);
    }
}
