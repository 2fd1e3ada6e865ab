// Norms of gradients as exact sums (`reference.norm`), and whether any is not finite, in one read.
#include "exact_sum.h"

namespace {

// In the order of `fast.runtime.native.CHOICES`.
enum Kind : int64_t { LARGEST_MAGNITUDE, MAGNITUDES, SQUARES };

constexpr int64_t SPAN_OF_NORM = 16384;  // elements of an entry of the pointer table

void take(int64_t* own, const void* values, Type type, int64_t first, int64_t count, Kind kind) {
  for (int64_t at = first; at < first + count; at += CHUNK) {
    const int64_t size = std::min(CHUNK, first + count - at);
    if (kind == SQUARES) {
      add_squares(own, values, type, at, size);
      continue;
    }
    for (int64_t begin = at; begin < at + size; begin += BLOCK) {
      const int64_t part = std::min(BLOCK, at + size - begin);
      float buffer[BLOCK];
      const float* x = widened(values, type, begin, part, buffer);
      if (kind == MAGNITUDES)
        add_magnitudes(own, x, part);
      else
        own[LARGEST] = std::max<int64_t>(own[LARGEST], largest_bits(x, part));
    }
  }
}

// Sums of each thread, added up.
struct Sums {
  std::vector<int64_t> own;
  explicit Sums(int64_t threads) : own(std::max<int64_t>(threads, 1) * PADDED, 0) {}
  int64_t* of(int64_t thread) { return own.data() + thread * PADDED; }
  void add_to(int64_t* limbs) const {
    for (size_t i = 0; i < own.size(); ++i) {
      int64_t& limb = limbs[i % PADDED];
      limb = i % PADDED == LARGEST ? std::max(limb, own[i]) : limb + own[i];
    }
  }
};

}  // namespace

extern "C" {

void reduce_flat_kernel(const void* grads, int64_t* limbs, int64_t numel, Type g, Kind kind, int64_t,
                        int64_t threads) {
  Sums sums(threads);
  const int64_t chunks = (numel + CHUNK - 1) / CHUNK;
  for_parts(chunks, worth(threads, chunks), [&](int64_t chunk, int64_t thread) {
    const int64_t first = chunk * CHUNK;
    take(sums.of(thread), grads, g, first, std::min(CHUNK, numel - first), kind);
  });
  sums.add_to(limbs);
}

void reduce_list_kernel(const int64_t* words, int64_t* limbs, int64_t tensors, int64_t chunks,
                        Type g, Kind kind, int64_t, int64_t threads) {
  Sums sums(threads);
  const Table table = {words, tensors, 1};
  table.for_chunks(chunks, SPAN_OF_NORM, threads,
                   [&](int64_t t, int64_t first, int64_t count, int64_t thread) {
                     take(sums.of(thread), table.address(0, t), g, first, count, kind);
                   });
  sums.add_to(limbs);
}

void norm_kernel(const int64_t* limbs, float* norm, float* found_inf, int64_t, int64_t) {
  Environment plain;
  *norm = norm_of(limbs);
  if (limbs[NONFINITE] != 0) *found_inf = 1.0f;
}
}
