// Element by element: accumulation, copies in another precision, unscaling, and flat buffers.
#include "common.h"

namespace {

void accumulate_part(void* sums, const void* values, Type a, Type g, int64_t first, int64_t length) {
  float widened_sums[BLOCK], grads[BLOCK];
  for (int64_t at = first; at < first + length; at += BLOCK) {
    const int64_t count = std::min(BLOCK, first + length - at);
    float* sum = const_cast<float*>(widened(sums, a, at, count, widened_sums));
    const float* grad = widened(values, g, at, count, grads);
    for (int64_t i = 0; i < count; ++i) sum[i] = sum[i] + grad[i];
    rounded(sum, sums, a, at, count);
  }
}

void cast_part(const void* sources, void* copies, Type s, Type c, int64_t first, int64_t length) {
  float buffer[BLOCK];
  for (int64_t at = first; at < first + length; at += BLOCK) {
    const int64_t count = std::min(BLOCK, first + length - at);
    rounded(widened(sources, s, at, count, buffer), copies, c, at, count);
  }
}

void unscale_part(void* grads, Type g, float factor, float* found_inf, int64_t first,
                  int64_t length) {
  float buffer[BLOCK];
  uint32_t largest = 0;
  for (int64_t at = first; at < first + length; at += BLOCK) {
    const int64_t count = std::min(BLOCK, first + length - at);
    float* x = const_cast<float*>(widened(grads, g, at, count, buffer));
    for (int64_t i = 0; i < count; ++i) {
      largest = std::max(largest, bits_of<uint32_t>(x[i]) & 0x7FFFFFFF);
      x[i] = x[i] * factor;
    }
    rounded(x, grads, g, at, count);
  }
  // Several threads may find one.
  if (largest >= 0x7F800000) __atomic_store_n((uint32_t*)found_inf, 0x3F800000u, __ATOMIC_RELAXED);
}

}  // namespace

extern "C" {

void accumulate_flat_kernel(void* sums, const void* grads, int64_t numel, Type a, Type g, int64_t,
                            int64_t threads) {
  for_chunks(numel, threads, [&](int64_t first, int64_t count) {
    accumulate_part(sums, grads, a, g, first, count);
  });
}

void accumulate_list_kernel(const int64_t* words, int64_t tensors, Type a, Type g, int64_t chunks,
                            int64_t threads) {
  const Table table = {words, tensors, 2};
  table.for_chunks(chunks, CHUNK, threads, [&](int64_t t, int64_t first, int64_t count, int64_t) {
    accumulate_part(table.address(0, t), table.address(1, t), a, g, first, count);
  });
}

void cast_flat_kernel(const void* sources, void* copies, int64_t numel, Type s, Type c, int64_t,
                      int64_t threads) {
  for_chunks(numel, threads, [&](int64_t first, int64_t count) {
    cast_part(sources, copies, s, c, first, count);
  });
}

void cast_list_kernel(const int64_t* words, int64_t tensors, Type s, Type c, int64_t chunks,
                      int64_t threads) {
  const Table table = {words, tensors, 2};
  table.for_chunks(chunks, CHUNK, threads, [&](int64_t t, int64_t first, int64_t count, int64_t) {
    cast_part(table.address(0, t), table.address(1, t), s, c, first, count);
  });
}

void unscale_flat_kernel(void* grads, const float* inv_scale, float* found_inf, int64_t numel,
                         Type g, int64_t, int64_t threads) {
  const float factor = *inv_scale;
  for_chunks(numel, threads, [&](int64_t first, int64_t count) {
    unscale_part(grads, g, factor, found_inf, first, count);
  });
}

void unscale_list_kernel(const int64_t* words, const float* inv_scale, float* found_inf,
                         int64_t tensors, Type g, int64_t chunks, int64_t threads) {
  const float factor = *inv_scale;
  const Table table = {words, tensors, 1};
  table.for_chunks(chunks, CHUNK, threads, [&](int64_t t, int64_t first, int64_t count, int64_t) {
    unscale_part(table.address(0, t), g, factor, found_inf, first, count);
  });
}

// Regions of words: as many as a region has copied, then zeros up to its extent.
void copy_kernel(const int64_t* words, int64_t regions, Type w, int64_t chunks, int64_t threads) {
  const Table table = {words, regions, 2};
  const int64_t width = w == INT16 ? 2 : 4;
  for_parts(chunks, worth(threads, chunks), [&](int64_t index, int64_t) {
    const int64_t t = table.pair(index)[0], first = table.pair(index)[1] * CHUNK;
    const int64_t end = std::min(first + CHUNK, table.slot(t));
    const int64_t filled = std::min(std::max(table.numel(t) - first, int64_t(0)), end - first);
    char* target = (char*)table.address(1, t) + first * width;
    std::memcpy(target, (const char*)table.address(0, t) + first * width, filled * width);
    std::memset(target + filled * width, 0, (end - first - filled) * width);
  });
}
}
