// AVX512 with VNNI: Intel since Cascade Lake, unless tiles may be used.
#include "kernels/simd_avx512_vnni-inl.h"
// The headers below are written in its terms.
#include "kernels/vnni_target-inl.h"

namespace torch_mesh {

constinit const KernelTable kAvx512VnniTable = make_table<VnniTarget>("avx512_vnni");

}  // namespace torch_mesh
