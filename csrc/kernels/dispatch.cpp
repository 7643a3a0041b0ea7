// Chooses the table that runs: the best one that the processor supports, or the one that
// TORCH_MESH_ISA names.
#include <cstdint>
#include <cstdlib>
#include <string>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "base/error.h"
#include "kernels/expert_ffn.h"
#include "kernels/kernel_table.h"

namespace torch_mesh {
namespace {

struct Candidate {
  const KernelTable* table;
  bool (*runs)();
};

#if defined(__x86_64__)
// __builtin_cpu_supports asks the operating system (XGETBV) about the registers too.
bool runs_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
bool runs_avx_vnni() { return runs_avx2() && __builtin_cpu_supports("avxvnni"); }
bool runs_avx512() {
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512cd");
}
bool runs_avx512_vnni() { return runs_avx512() && __builtin_cpu_supports("avx512vnni"); }
bool runs_avx512_bf16() { return runs_avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }

// The operating system lets a process use tiles only on request.
bool runs_amx() {
  if (!runs_avx512_bf16()) return false;
  uint32_t eax, ebx, ecx, edx;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  constexpr uint32_t kNeeded =
      uint32_t{1} << 22 | uint32_t{1} << 24 | uint32_t{1} << 25;  // bf16, tile, int8
  if ((edx & kNeeded) != kNeeded) return false;
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

constexpr Candidate kCandidates[] = {
    {&kScalarTable, [] { return true; }},
#if defined(__x86_64__)
    {&kAvx2Table, [] { return runs_avx2() && !__builtin_cpu_is("amd"); }},
    {&kAmdAvx2Table, [] { return runs_avx2() && __builtin_cpu_is("amd"); }},
    {&kAvxVnniTable, runs_avx_vnni},
    {&kAvx512Table, runs_avx512},
    {&kAvx512VnniTable, runs_avx512_vnni},
    {&kZen4Bf16Table, [] { return runs_avx512_bf16() && __builtin_cpu_is("amdfam19h"); }},
    {&kAvx512Bf16Table,  // on Intel's cores fp32 products are faster (0027)
     [] {
       return runs_avx512_bf16() && !__builtin_cpu_is("amdfam19h") && !__builtin_cpu_is("intel");
     }},
    {&kAmxTable, runs_amx},
#endif
};

std::string list(const std::vector<std::string_view>& names) {
  std::string text;
  for (std::string_view name : names) text += (text.empty() ? "" : ", ") + std::string(name);
  return text;
}

const KernelTable& first_choice() {
  const char* name = std::getenv("TORCH_MESH_ISA");
  if (name != nullptr && *name != '\0') return kernel_table(name);
  return kernel_table(kernel_tables().back());
}

}  // namespace

const KernelTable& kernel_table() {
  static const KernelTable& table = first_choice();
  return table;
}

const KernelTable& kernel_table(std::string_view name) {
  for (const Candidate& candidate : kCandidates) {
    if (candidate.table->name == name && candidate.runs()) return *candidate.table;
  }
  throw_invalid("no kernels for the instruction set \"", name,
                "\" (TORCH_MESH_ISA); this processor runs ", list(kernel_tables()));
}

std::vector<std::string_view> kernel_tables() {
  std::vector<std::string_view> names;
  for (const Candidate& candidate : kCandidates) {
    if (candidate.runs()) names.emplace_back(candidate.table->name);
  }
  return names;
}

const char* kernel_table_name(const KernelTable& table) { return table.name; }

}  // namespace torch_mesh
