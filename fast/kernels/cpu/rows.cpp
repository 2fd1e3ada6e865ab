// Kernels of ZeRO's offload: every tensor is a row of addresses, sizes and types.

namespace {

// Calls work(tensor, first element, count, thread) for every chunk, each thread a run of them.
template <class Row, class Work>
void for_rows(const Row* rows, int64_t tensors, int64_t threads, Work work) {
  int64_t elements = 0;
  std::vector<int64_t> ends;  // chunks up to the end of each tensor
  for (int64_t t = 0; t < tensors; ++t) {
    ends.push_back((t ? ends[t - 1] : 0) + (rows[t].numel + CHUNK - 1) / CHUNK);
    elements += rows[t].numel;
  }
  const int64_t chunks = tensors ? ends[tensors - 1] : 0;
  for_parts(chunks, std::min(threads, elements / GRAIN), [&](int64_t chunk, int64_t thread) {
    const int64_t t = std::upper_bound(ends.begin(), ends.end(), chunk) - ends.begin();
    const int64_t first = (chunk - (t ? ends[t - 1] : 0)) * CHUNK;
    work(t, first, std::min(CHUNK, rows[t].numel - first), thread);
  });
}

}  // namespace

extern "C" {

struct AdamRow {
  // copy: nullptr for none; remainders where its type is INT16
  void *param, *grad, *exp_avg, *exp_avg_sq, *copy;
  int64_t* step;
  int64_t numel, param_type, grad_type, copy_type;
};

// hyper: lr, beta1, beta2, eps, weight decay, factor. Advances the counters. As sums: gradients are
// taken for sums that began at 0.0, which are never -0.0.
void twinstep_adam(const AdamRow* rows, int64_t tensors, const double* hyper, int64_t decoupled,
                   int64_t bias_correction, int64_t as_sums, int64_t threads) {
  std::vector<AdamScalars> scalars(tensors);
  {
    Environment plain;
    const double b1 = hyper[1], b2 = hyper[2];
    const AdamScalars s = {(float)hyper[0], (float)hyper[4], (float)hyper[5], (float)b1,
                           (float)(1.0 - b1), (float)b2, (float)(1.0 - b2), (float)hyper[3],
                           1.0f, 1.0f};
    for (int64_t t = 0; t < tensors; ++t) {
      const int64_t step = ++*rows[t].step;
      scalars[t] = s;
      if (bias_correction) {
        scalars[t].k1 = (float)(1.0 - power(b1, step));
        scalars[t].k2 = (float)(1.0 - power(b2, step));
      }
    }
  }
  int64_t elements = 0;
  for (int64_t t = 0; t < tensors; ++t) elements += rows[t].numel;
  for_rows(rows, tensors, threads, [&](int64_t t, int64_t first, int64_t count, int64_t) {
    const AdamRow& r = rows[t];
    const AdamTensor row = {r.param, r.grad, r.exp_avg, r.exp_avg_sq, r.copy, (Type)r.param_type,
                            (Type)r.grad_type, FP32, (Type)r.copy_type};
    adam_part(row, first, count, scalars[t], decoupled, as_sums, elements >= FAR);
  });
}

struct SumRow {
  void *sum, *grad;
  int64_t numel, sum_type, grad_type;
};

void twinstep_accumulate(const SumRow* rows, int64_t tensors, int64_t threads) {
  for_rows(rows, tensors, threads, [&](int64_t t, int64_t first, int64_t count, int64_t) {
    const SumRow& row = rows[t];
    accumulate_part(row.sum, row.grad, (Type)row.sum_type, (Type)row.grad_type, first, count);
  });
}

struct SquareRow {
  void* values;
  int64_t numel, type;
};

// Adds the squares of all elements to int64[32], laid out as in `fast.kernels._limbs`.
void twinstep_add_squares(const SquareRow* rows, int64_t tensors, int64_t* limbs, int64_t threads) {
  Sums sums(threads);
  for_rows(rows, tensors, threads, [&](int64_t t, int64_t first, int64_t count, int64_t thread) {
    add_squares(sums.of(thread), rows[t].values, (Type)rows[t].type, first, count);
  });
  sums.add_to(limbs);
}

// Reads everything and hardly computes: the rate that a norm is compared with.
void twinstep_read(const SquareRow* rows, int64_t tensors, uint64_t* sum, int64_t threads) {
  std::vector<uint64_t> own(std::max<int64_t>(threads, 1), 0);
  for_rows(rows, tensors, threads, [&](int64_t t, int64_t first, int64_t count, int64_t thread) {
    const uint32_t* words = (const uint32_t*)rows[t].values + first;
    uint32_t sums[16] = {};
    for (int64_t i = 0; i + 16 <= count; i += 16)
      for (int lane = 0; lane < 16; ++lane) sums[lane] += words[i + lane];
    for (uint32_t lane : sums) own[thread] += lane;
  });
  for (uint64_t part : own) *sum += part;
}
}
