#include "residency/policies/policy.h"

#include <array>
#include <string>

#include "base/error.h"
#include "residency/policies/heat.h"
#include "residency/policies/lfu.h"
#include "residency/policies/lru.h"
#include "residency/policies/s3fifo.h"
#include "residency/policies/sieve.h"
#include "residency/policies/slru.h"
#include "residency/policies/two_queues.h"
#include "residency/policies/wtinylfu.h"

namespace torch_mesh {
namespace {

template <typename Kind>
std::unique_ptr<Policy> make(const PolicyOptions& options) {
  return std::make_unique<Kind>(options);
}

struct NamedPolicy {
  std::string_view name;
  std::unique_ptr<Policy> (*make)(const PolicyOptions&);
};

constexpr std::array<NamedPolicy, 8> kPolicies{{
    {"lru", make<Lru>},
    {"lfu", make<Lfu>},
    {"slru", make<Slru>},
    {"2q", make<TwoQueues>},
    {"sieve", make<Sieve>},
    {"s3fifo", make<S3Fifo>},
    {"wtinylfu", make<WTinyLfu>},
    {"heat", make<Heat>},
}};

}  // namespace

std::unique_ptr<Policy> make_policy(std::string_view name, const PolicyOptions& options) {
  if (options.layers < 1 || options.experts < 1 || options.slots < 1) {
    throw_invalid("a policy needs at least one layer, expert and slot, not ", options.layers, ", ",
                  options.experts, " and ", options.slots);
  }
  for (const NamedPolicy& policy : kPolicies) {
    if (policy.name == resolve_policy(name)) return policy.make(options);
  }
  std::string allowed = "auto";
  for (const NamedPolicy& policy : kPolicies) allowed += ", " + std::string(policy.name);
  throw_invalid("unknown policy \"", name, "\"; allowed are ", allowed);
}

std::vector<std::string_view> policy_names() {
  std::vector<std::string_view> names{"auto"};
  for (const NamedPolicy& policy : kPolicies) names.push_back(policy.name);
  return names;
}

}  // namespace torch_mesh
