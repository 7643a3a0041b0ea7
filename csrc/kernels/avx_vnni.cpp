// AVX2 with VNNI in its VEX form: processors of Intel without AVX512, from Alder Lake and Sierra
// Forest on.
#include "kernels/simd_avx_vnni-inl.h"
// The headers below are written in its terms.
#include "kernels/vnni_target-inl.h"

namespace torch_mesh {

constinit const KernelTable kAvxVnniTable = make_table<VnniTarget>("avx_vnni");

}  // namespace torch_mesh
