// One constructor per policy; make_policy() chooses among them by name.
#pragma once

#include <memory>
#include <string_view>

#include "residency/policies/policy.h"

namespace torch_mesh {

std::unique_ptr<Policy> make_lru(const PolicyOptions& options);
std::unique_ptr<Policy> make_lfu(const PolicyOptions& options);
std::unique_ptr<Policy> make_slru(const PolicyOptions& options);
std::unique_ptr<Policy> make_two_queues(const PolicyOptions& options);
std::unique_ptr<Policy> make_sieve(const PolicyOptions& options);
std::unique_ptr<Policy> make_s3fifo(const PolicyOptions& options);
std::unique_ptr<Policy> make_wtinylfu(const PolicyOptions& options);
std::unique_ptr<Policy> make_heat(const PolicyOptions& options);

}  // namespace torch_mesh
