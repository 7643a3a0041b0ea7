#include "engine/workspace.h"

#include <string>

#include "base/error.h"
#include "store/record.h"

namespace torch_mesh {
namespace {

constexpr int64_t kCacheLine = 64;

}  // namespace

std::byte* Buffer::reserve(int64_t bytes) {
  if (bytes > bytes_) {
    data_.reset();
    bytes_ = 0;
    const int64_t rounded = round_up(bytes, kCacheLine);
    data_ = aligned_memory(kCacheLine, static_cast<size_t>(rounded));
    if (data_ == nullptr) {
      throw Error(ErrorKind::kMemory, "no memory for a workspace of " + std::to_string(rounded) +
                                          " bytes; lower `workspace` or free memory");
    }
    bytes_ = rounded;
  }
  return data_.get();
}

WorkspacePool::Lease::Lease(WorkspacePool& pool) : pool_(pool) {
  {
    std::lock_guard lock(pool_.mutex_);
    if (pool_.idle_.empty()) {
      // Room for all of them: the destructor must not allocate.
      pool_.idle_.reserve(pool_.made_ + 1);
      workspace_ = std::make_unique<Workspace>();
      ++pool_.made_;
    } else {
      workspace_ = std::move(pool_.idle_.back());
      pool_.idle_.pop_back();
    }
  }
  bytes_before_ = workspace_->bytes();
}

WorkspacePool::Lease::~Lease() {
  std::lock_guard lock(pool_.mutex_);
  pool_.bytes_ += workspace_->bytes() - bytes_before_;
  pool_.idle_.push_back(std::move(workspace_));
}

int64_t WorkspacePool::bytes() const {
  std::lock_guard lock(mutex_);
  return bytes_;
}

}  // namespace torch_mesh
