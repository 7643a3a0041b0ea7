// The data plane's table of contents. Implementations stand in the file of their op's name: experts
// and its kin in experts.cpp, those that ask or tell the pool in residency.cpp, linear's packing
// beside it. Gradients are put together in autograd.cpp; fake kernels are in ops/.
//
// `handle` is an int64 CPU tensor [pool, layer, generation]: ids, never pointers. Ops with a
// gradient are functional, because autograd refuses schemas that mutate; ops that exist for their
// effect on the pool say that they mutate the handle, so that torch.compile keeps them and keeps
// their order.
#include <torch/library.h>

#include <vector>

TORCH_LIBRARY(torch_mesh, m) {
  // A replay of a captured graph would not run the engine.
  const std::vector<at::Tag> unsafe = {at::Tag::cudagraph_unsafe};

  // x [T, hidden], topk_ids [T, k] int, topk_weights [T, k] float -> [T, hidden] in x's dtype. Ids
  // outside [0, experts) are an error; with `sentinels`, ids >= experts are skipped (expert
  // parallelism). Given the router weight [experts, hidden] and the handle of the layer that runs
  // next, reads of the `next_top_k` experts that it ranks first for x are queued behind this
  // layer's own: a hint, as `lookahead` is. A router with a bias [experts] adds it to what
  // `next_scoring` makes of its logits: logits, sigmoid, softmax or sqrtsoftplus.
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

  // As `experts`, with low-rank adapters: gate_up += scaling * (x · a^T) · b before the
  // activation and down likewise, for the projections that have them. gate_up_a [experts, rank,
  // hidden], gate_up_b [experts, rank, halves, intermediate], down_a [experts, rank, intermediate],
  // down_b [experts, rank, hidden], in any floating dtype and any strides; fp32 that is contiguous
  // in its last dimension is read where it lies.
  m.def(
      "experts_adapted(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor handle, Tensor? "
      "gate_up_a, Tensor? gate_up_b, float gate_up_scaling, Tensor? down_a, Tensor? down_b, float "
      "down_scaling, bool sentinels=False, Tensor? next_router=None, Tensor? next_handle=None, "
      "int next_top_k=0, Tensor? next_bias=None, str next_scoring='logits') -> Tensor",
      unsafe);
  // Of x, topk_weights and the four tensors of adapters, empty for those that are not there.
  m.def(
      "experts_adapted_backward(Tensor grad, Tensor x, Tensor topk_ids, Tensor topk_weights, "
      "Tensor handle, Tensor? gate_up_a, Tensor? gate_up_b, float gate_up_scaling, Tensor? down_a, "
      "Tensor? down_b, float down_scaling, bool sentinels=False) -> (Tensor, Tensor, Tensor, "
      "Tensor, Tensor, Tensor)",
      unsafe);

  // Lossy. As `experts`, but in a decode step up to `deferred` choices of each token, those of
  // least weight whose experts are not resident, are left out, and added to what this op gives for
  // the next layer of the same thread. What is left when another layer, other rows or an error
  // follow is dropped.
  m.def(
      "experts_deferred(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor(a!) handle, "
      "int deferred, bool last_layer, bool sentinels=False, Tensor? next_router=None, Tensor? "
      "next_handle=None, int next_top_k=0, Tensor? next_bias=None, str next_scoring='logits') "
      "-> Tensor",
      unsafe);
  // Lossy. As `experts`, but in a decode step choices whose experts are not
  // resident are computed from the records that the pool of `fallback`, the same layer in a format
  // of fewer bits, has or reads for them. The own pool learns of their use, and reads what deserves
  // a slot before the next. So does `fallback` what the next layer's router ranks first, where that
  // layer's own pool does not have it.
  m.def(
      "experts_fallback(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor(a!) handle, "
      "Tensor fallback, bool sentinels=False, Tensor? next_router=None, Tensor? next_handle=None, "
      "int next_top_k=0, Tensor? next_bias=None, str next_scoring='logits') -> Tensor",
      unsafe);
  // Lossy. scores [T, experts] that a router selects by and its choice topk_ids [T, k] among them
  // -> int64 [T, k]. In a decode step a resident expert takes the place of a cold one whose score
  // is higher by less than `bias` times the spread of the token's scores. The `kept` choices of
  // highest score stay, and every choice stays in its place.
  m.def("route(Tensor scores, Tensor topk_ids, Tensor(a!) handle, float bias, int kept) -> Tensor",
        unsafe);

  // x_sorted [R, in] with rows grouped by expert, offsets int64 [experts + 1]; projection 0 gives
  // [gate | up], 1 down; biases are added. The width of the result is an argument because a fake
  // kernel cannot look it up in the pool.
  // top_k, how many rows each token has, tells statistics a decode step from a prompt.
  m.def(
      "grouped_linear(Tensor x_sorted, Tensor offsets, Tensor handle, int projection, "
      "int out_features, int top_k=1) -> Tensor",
      unsafe);
  m.def(
      "grouped_linear_backward(Tensor grad, Tensor offsets, Tensor handle, int projection, "
      "int in_features) -> Tensor",
      unsafe);

  m.def("promote(Tensor(a!) handle, Tensor ids) -> ()", unsafe);
  m.def("prefetch(Tensor(a!) handle, Tensor ids) -> ()", unsafe);
  // Prefetches the experts that the next layer's router, [experts, hidden], ranks first for x:
  // `handle` names that layer. Bias and scoring are those of `experts`.
  m.def(
      "lookahead(Tensor x, Tensor router_weight, Tensor(a!) handle, int top_k, "
      "Tensor? after=None, Tensor? bias=None, str scoring='logits') -> ()",
      unsafe);
  m.def("evict(Tensor(a!) handle, Tensor ids) -> ()", unsafe);
  m.def("observe(Tensor(a!) handle, Tensor router_logits) -> ()", unsafe);
  m.def("residency(Tensor(a!) handle) -> Tensor", unsafe);

  // gate [intermediate, hidden] (or none), up likewise, down [hidden, intermediate], any strides ->
  // uint8 [record bytes].
  m.def(
      "pack(Tensor? gate, Tensor up, Tensor down, Tensor? gate_bias, Tensor? up_bias, "
      "Tensor? down_bias, str format, int group_size) -> Tensor");
  // The same with each input's rounding errors fed to those behind it: feedback [inputs, inputs],
  // of which the part left of the diagonal counts, and importance [inputs], both fp32, of what gate
  // and up see (hidden) and of what down sees (csrc/kernels/pack_calibrated.h).
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
  // `packed` is what pack_linear gives for these sizes, format and group size; bias float
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
  // The same of a GGUF file's blocks: uint8 [out_features, bytes of a row], of the type that
  // `format` holds (Q8_0 is int8_fp16, Q4_0 int4_fp16). Groups are those of the type.
  m.def("pack_linear_blocks(Tensor blocks, int in_features, str format) -> Tensor");
  m.def(
      "unpack_linear(Tensor packed, int in_features, int out_features, str format, int group_size) "
      "-> Tensor");

  // Rows of an embedding table that is read from files: ids [...], int32 or int64, each within [0,
  // rows) -> [..., dim] of `dtype`, the table's own. `handle` is [tables, table, generation]. A
  // fake kernel cannot look dim and dtype up. No gradient.
  m.def("gather_rows(Tensor ids, Tensor handle, int dim, ScalarType dtype) -> Tensor", unsafe);
  // Begins to read them into the table's cache: a hint.
  m.def("prefetch_rows(Tensor ids, Tensor(a!) handle) -> ()", unsafe);

  // linear of weights as they are: x [..., in_features] and weight [out_features, in_features],
  // both bf16, rows of the weight contiguous. No gradient.
  m.def("plain_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", unsafe);

  // A few query rows over a cache: query [batch, heads, tokens, key_dim], key and value [batch,
  // key_value_heads, keys, key_dim or value_dim], mask [batch, 1, tokens, keys], bool (True: sees)
  // or added to scale * query . key -> [batch, tokens, heads, value_dim] in query's dtype. A token
  // that sees no key gets zeros. Head dimensions are multiples of 16 up to 256. No gradient.
  m.def("attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale) -> Tensor",
        unsafe);
}
