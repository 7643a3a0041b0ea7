// The schemas of all ops, the data plane. Each op is implemented in the file of its name: experts
// and its variants in experts.cpp, ops on the pool in residency.cpp, the packing for linear in
// linear.cpp. Gradients are registered in autograd.cpp; fake kernels are in ops/.
//
// `handle` is an int64 CPU tensor [pool, layer]: ids, never pointers. Ops with a
// gradient are functional, because autograd refuses schemas that mutate. Ops that exist for their
// effect on the pool are declared to mutate the handle, so that torch.compile keeps them in order.
#include <torch/library.h>

#include <vector>

TORCH_LIBRARY(torch_mesh, m) {
  // A replay of a captured graph would not run the engine.
  const std::vector<at::Tag> unsafe = {at::Tag::cudagraph_unsafe};

  // x [T, hidden], topk_ids [T, k] int, topk_weights [T, k] float -> [T, hidden] in x's dtype. Ids
  // outside [0, experts) are an error; with `sentinels`, ids >= experts are skipped (expert
  // parallelism). `next_router` [experts, hidden] and `next_handle` are of the layer that runs
  // next. The `next_top_k` experts that its router ranks first for x are read after this layer's
  // own: a hint, as by `lookahead`. `next_scoring` (logits, sigmoid, softmax or sqrtsoftplus) is
  // applied to the router's logits before `next_bias` [experts] is added.
  m.def(
      "experts(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor handle, bool "
      "sentinels=False, Tensor? next_router=None, Tensor? next_handle=None, int next_top_k=0, "
      "Tensor? next_bias=None, str next_scoring='logits') -> Tensor",
      unsafe);
  m.def(
      "experts_backward(Tensor grad, Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor "
      "handle, "
      "bool sentinels=False) -> (Tensor, Tensor)",
      unsafe);

  // As `experts`, with low-rank adapters: gate_up += scaling * (x · a^T) · b before the activation
  // and down likewise, for the projections that have them. gate_up_a [experts, rank, hidden],
  // gate_up_b [experts, rank, halves, intermediate], down_a [experts, rank, intermediate], down_b
  // [experts, rank, hidden], in bf16, fp16 or fp32 and any strides. They are used in place if all
  // are fp32 and contiguous in their last dimension.
  m.def(
      "experts_adapted(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor handle, Tensor? "
      "gate_up_a, Tensor? gate_up_b, float gate_up_scaling, Tensor? down_a, Tensor? down_b, float "
      "down_scaling, bool sentinels=False, Tensor? next_router=None, Tensor? next_handle=None, "
      "int next_top_k=0, Tensor? next_bias=None, str next_scoring='logits') -> Tensor",
      unsafe);
  // The gradients of x, topk_weights and the four adapter tensors; empty for those not given.
  m.def(
      "experts_adapted_backward(Tensor grad, Tensor x, Tensor topk_ids, Tensor topk_weights, "
      "Tensor handle, Tensor? gate_up_a, Tensor? gate_up_b, float gate_up_scaling, Tensor? down_a, "
      "Tensor? down_b, float down_scaling, bool sentinels=False) -> (Tensor, Tensor, Tensor, "
      "Tensor, Tensor, Tensor)",
      unsafe);

  // Lossy. As `experts`, but in a decode step up to `deferred` choices of each token are left out:
  // those of least weight whose experts are not resident. The thread's next call, for the next
  // layer, adds their products to its output. They are dropped if another layer, other rows or an
  // error follow.
  m.def(
      "experts_deferred(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor(a!) handle, "
      "int deferred, bool last_layer, bool sentinels=False, Tensor? next_router=None, Tensor? "
      "next_handle=None, int next_top_k=0, Tensor? next_bias=None, str next_scoring='logits') "
      "-> Tensor",
      unsafe);
  // Lossy. As `experts`, but in a decode step choices whose experts are not resident are computed
  // by the pool of `fallback`, the same layer in a format of fewer bits, which reads the records
  // that it lacks. The pool of `handle` counts their use, and reads the experts that are worth a
  // slot ahead of the next use. Predicted experts that the next layer's pool lacks are read into
  // the pool of `fallback`.
  m.def(
      "experts_fallback(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor(a!) handle, "
      "Tensor fallback, bool sentinels=False, Tensor? next_router=None, Tensor? next_handle=None, "
      "int next_top_k=0, Tensor? next_bias=None, str next_scoring='logits') -> Tensor",
      unsafe);
  // Lossy. scores [T, experts] by which a router selects, and its selection topk_ids [T, k] ->
  // int64 [T, k]. In a decode step a resident expert replaces a cold one whose score is higher by
  // less than `bias` times the spread of the token's scores. The `kept` choices of highest score
  // are never replaced. Choices keep their columns.
  m.def("route(Tensor scores, Tensor topk_ids, Tensor(a!) handle, float bias, int kept) -> Tensor",
        unsafe);

  // x_sorted [R, in] with rows grouped by expert, offsets int64 [experts + 1]; projection 0 gives
  // [gate | up], 1 down; biases are added. The width of the result is an argument because a fake
  // kernel cannot look it up in the pool.
  // top_k: the rows of each token, by which statistics tell a decode step from a prompt. With
  // `sentinels`, rows behind the last offset belong to no expert, and their result is zero.
  m.def(
      "grouped_linear(Tensor x_sorted, Tensor offsets, Tensor handle, int projection, "
      "int out_features, int top_k=1, bool sentinels=False) -> Tensor",
      unsafe);
  m.def(
      "grouped_linear_backward(Tensor grad, Tensor offsets, Tensor handle, int projection, "
      "int in_features) -> Tensor",
      unsafe);

  m.def("promote(Tensor(a!) handle, Tensor ids) -> ()", unsafe);
  m.def("prefetch(Tensor(a!) handle, Tensor ids) -> ()", unsafe);
  // Prefetches the experts that the router of layer `handle`, [experts, hidden], ranks first for x.
  // Bias and scoring are next_bias and next_scoring of `experts`. `after` is not read: the call
  // depends on it, and so follows the op that made it.
  m.def(
      "lookahead(Tensor x, Tensor router_weight, Tensor(a!) handle, int top_k, "
      "Tensor? after=None, Tensor? bias=None, str scoring='logits') -> ()",
      unsafe);
  m.def("evict(Tensor(a!) handle, Tensor ids) -> ()", unsafe);
  m.def("residency(Tensor(a!) handle) -> Tensor", unsafe);

  // gate [intermediate, hidden] (or none), up likewise, down [hidden, intermediate], any strides ->
  // uint8 [record bytes].
  m.def(
      "pack(Tensor? gate, Tensor up, Tensor down, Tensor? gate_bias, Tensor? up_bias, "
      "Tensor? down_bias, str format, int group_size) -> Tensor");
  // The same with each input's rounding errors fed back to later inputs
  // (csrc/kernels/pack_calibrated.h). feedback [inputs, inputs], of which only the part left of the
  // diagonal is read, and importance [inputs] are fp32: for the inputs of gate and up (hidden) and
  // those of down (intermediate).
  m.def(
      "pack_calibrated(Tensor? gate, Tensor up, Tensor down, Tensor? gate_bias, Tensor? up_bias, "
      "Tensor? down_bias, Tensor hidden_feedback, Tensor hidden_importance, Tensor "
      "intermediate_feedback, Tensor intermediate_importance, str format, int group_size) -> "
      "Tensor");
  // -> float gate_up [halves * intermediate, hidden] with gate first, down, and their biases (empty
  // where there are none).
  m.def(
      "unpack(Tensor record, str format, int group_size, int hidden, int intermediate, bool gated, "
      "bool bias) -> (Tensor, Tensor, Tensor, Tensor)");

  // A linear layer outside the experts: x [..., in_features] -> [..., out_features] in x's dtype.
  // `packed` is the result of pack_linear for these sizes, format and group size; bias float
  // [out_features].
  m.def(
      "linear(Tensor x, Tensor packed, Tensor? bias, int in_features, int out_features, str "
      "format, "
      "int group_size) -> Tensor",
      unsafe);
  m.def(
      "linear_backward(Tensor grad, Tensor packed, int in_features, int out_features, str format, "
      "int group_size) -> Tensor",
      unsafe);
  // weight [out_features, in_features], any strides -> uint8, and back to float.
  m.def("pack_linear(Tensor weight, str format, int group_size) -> Tensor");
  // The same for blocks of a GGUF file: uint8 [out_features, bytes of a row], of the type whose
  // codes `format` holds (Q8_0 is int8_fp16, Q4_0 int4_fp16). The type sets the groups.
  m.def("pack_linear_blocks(Tensor blocks, int in_features, str format) -> Tensor");
  m.def(
      "unpack_linear(Tensor packed, int in_features, int out_features, str format, int group_size) "
      "-> Tensor");

  // Rows of an embedding table that is read from files: ids [...], int32 or int64, each within [0,
  // rows) -> [..., dim] of `dtype`, which is the table's. `handle` is [tables, table].
  // dim and dtype are arguments because a fake kernel cannot look them up. No gradient.
  m.def("gather_rows(Tensor ids, Tensor handle, int dim, ScalarType dtype) -> Tensor", unsafe);
  // Begins to read these rows into the table's cache: a hint.
  m.def("prefetch_rows(Tensor ids, Tensor(a!) handle) -> ()", unsafe);

  // linear with unpacked weights: x [..., in_features] and weight [out_features, in_features], both
  // bf16, rows of the weight contiguous. No gradient.
  m.def("plain_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", unsafe);

  // A few query rows over a cache: query [batch, heads, tokens, key_dim], key and value [batch,
  // key_value_heads, keys, key_dim or value_dim], mask [batch or 1, 1, tokens or 1, keys], bool
  // (True: attends) or added to scale * query . key -> [batch, tokens, heads, value_dim] in query's
  // dtype. A token that attends to no key gets zeros. Head dimensions are multiples of 16 up to
  // 256. No gradient.
  m.def("attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale) -> Tensor",
        unsafe);
}
