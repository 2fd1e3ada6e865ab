// Threads on ways of their own: an array for each, a switch, masks of a warp.
extern "C" __global__ void median9(const float *x, float *out, int n) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= n) return;
    float window[9];
    int count = 0;
    for (int i = at - 4; i <= at + 4; ++i)
        if (i >= 0 && i < n) {
            int place = count++;
            float value = x[i];
            while (place > 0 && window[place - 1] > value) {
                window[place] = window[place - 1];
                --place;
            }
            window[place] = value;
        }
    out[at] = window[count / 2];
}

extern "C" __global__ void machine(const unsigned char *program, int *out, int length) {
    int at = blockIdx.x * blockDim.x + threadIdx.x, a = at, b = 1;
    for (int step = 0; step < length; ++step) {
        switch (program[step * 64 + at % 64]) {
        case 0: a += b; break;
        case 1: b = a ^ (b << 3); break;
        case 2: a *= 5; break;
        case 3: b -= at; break;
        case 4: a = b > 0 ? a : -a; break;
        case 5: a >>= 1; break;
        case 6: b = ~b; break;
        default: out[at] = a - b; return;
        }
    }
    out[at] = a + b;
}

extern "C" __global__ void votes(const int *x, unsigned *out) {
    int at = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32, value = x[at];
    unsigned all = 0xffffffffu, same = __match_any_sync(all, value);
    unsigned word = same * 3u;
    word += __ballot_sync(all, value > 0);
    word ^= __any_sync(all, value == 7) ? 0x100u : 0x200u;
    word += __all_sync(all, value > -50) ? 5u : 9u;
    word += __reduce_add_sync(all, (unsigned)value);
    word ^= __reduce_max_sync(all, value);
    word += __shfl_xor_sync(all, value, 9) + __shfl_up_sync(all, value, 1, 8) * 2;
    if (lane % 2) {
        unsigned odd = __activemask();
        __syncwarp(0xaaaaaaaau);
        word += __popc(odd & 0xaaaaaaaau) + __shfl_sync(0xaaaaaaaau, value, lane ^ 2);
    }
    out[at] = word;
}
