// The exact norm of all gradients and whether any is non-finite, in one read.
//
// Compiled with G, the dtype of the gradients.
#include "exact_sum.h"

#define SPAN 16384  // elements of an entry of the pointer table
#define THREADS 256
#define EACH (G == FP32 ? 4 : 8)  // elements by one access of 16 bytes
#define PACKS 2                   // accesses of a thread before the first is needed
#define TILE (PACKS * EACH * THREADS)

struct Tile {
    Pack<G, EACH> packs[PACKS];

    // Elements behind the end are zeros.
    __device__ void load(const Stored<G>::word *from, int left, bool aligned) {
        if (aligned && left >= TILE) {
            const auto wide = reinterpret_cast<const Pack<G, EACH> *>(from);
#pragma unroll
            for (int j = 0; j < PACKS; j++) packs[j] = wide[j * THREADS + threadIdx.x];
            return;
        }
#pragma unroll
        for (int j = 0; j < PACKS; j++) {
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const int at = (j * EACH + i) * THREADS + (int)threadIdx.x;
                packs[j].set(i, at < left ? widen<G>(from[at]) : 0.0f);
            }
        }
    }
};

// Resident blocks: each walks over every n-th span and adds its limbs to memory once.
extern "C" __global__ void __launch_bounds__(THREADS)
    reduce_squares(const i64 *table, i64 *limbs, i64 tensors, i64 chunks) {
    __shared__ Limbs shared;
    shared.clear();
    Sum<G> sum(shared);
    for (i64 number = blockIdx.x; number < chunks; number += gridDim.x) {
        const Chunk chunk(table, tensors, 1, number, SPAN);
        const auto grads = chunk.row<G>(0);
        Tile tile;
        tile.load(grads, chunk.left, chunk.aligned);
        // Bounds are the block's: every lane of a warp makes every call of `sum`.
        for (int next = TILE; next - TILE < chunk.left; next += TILE) {
            Tile ahead;
            ahead.load(grads + next, chunk.left - next, chunk.aligned);
            float x[PACKS * EACH];
#pragma unroll
            for (int i = 0; i < PACKS * EACH; i++)
                x[i] = tile.packs[i / EACH][i % EACH];
            sum.add(x);
            tile = ahead;
        }
    }
    sum.flush();
    shared.finish(limbs);
}

// Round the limbs to the norm, and set found_inf where they hold what is not finite.
extern "C" __global__ void round_norm(const i64 *limbs, float *norm, float *found_inf) {
    *norm = norm_of(limbs);
    if (limbs[NONFINITE] != 0) *found_inf = 1.0f;
}
