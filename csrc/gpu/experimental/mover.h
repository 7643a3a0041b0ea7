// Experimental: dynamic placement (gpu={"placement": "dynamic"}). Outside of this folder only
// bindings/device.cpp needs it.
//
// Moves hot experts to a device while a model runs: between two steps, a batch at a time, in
// parallel with computation.
//
// A policy of the pool's kind chooses the experts that are wanted on the device: those that it
// would keep in a cache of as many slots. It follows every forward, moves nothing, and costs next
// to nothing. Experts that have been wanted for a while move, in batches. A batch is copied into
// spare slots. Then the table is written once, in the order of the stream that computes, so that no
// forward sees half of a batch. The slots that become free are for the next batch.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "engine/engine.h"
#include "gpu/driver.h"
#include "residency/policies/policy.h"

namespace torch_mesh {

struct MoverOptions {
  // The engine that has the records to copy: the pool's own, or one of the same layers and experts
  // in the device's format. Moves fail once it is closed.
  std::weak_ptr<Engine> source;
  DeviceAddress records;  // [slots][record bytes of the source]
  DeviceAddress table;    // int32 [layers][experts], which holds `slots_of` already
  int32_t slots;
  std::vector<int32_t> slots_of;  // [layers * experts]: the slot of each expert, or -1
  // bool [layers]: whether the layer's experts may move. They may not in a layer that is on the
  // device as a whole, whose forwards the host does not see, nor in one without experts there.
  std::vector<bool> moving;
  int32_t batch = 4;  // spare slots, and so the most experts that move at a time
  std::string policy = "auto";
  int32_t patience = 32;  // forwards of its layer for which an expert is wanted before it moves
  // Makes a stream wait until all other readers of the table have read it:
  // HostShare::follow_inputs. None: only that stream reads it.
  std::function<void(Stream)> before_switch = nullptr;
};

struct MoverStats {
  int64_t moved_up = 0;
  int64_t batches = 0;
  int64_t bytes_up = 0;
  int64_t failed = 0;               // batches that a failed read cut short
  std::exception_ptr last_failure;  // of those
};

class Mover {
 public:
  Mover(std::shared_ptr<Driver> driver, std::weak_ptr<Engine> engine, const MoverOptions& options);
  ~Mover();
  Mover(const Mover&) = delete;
  Mover& operator=(const Mover&) = delete;

  // A forward of a layer used these experts, top_k a token. Safe from any thread, such as a host
  // node's.
  void used(int32_t layer, std::span<const int64_t> ids, int32_t top_k);

  // To be called between two steps of `compute`, the only stream whose kernels read the slots.
  // Enters in the table a batch that has arrived, or begins the next one. Never waits, and does
  // nothing in a capture. Returns how many experts were entered.
  int32_t step(Stream compute);

  // Moves `up` to the device and `down` off it, and waits. Moves of other threads come before or
  // after it. Throws Error(kInvalid) for an expert that is named twice, is already where it should
  // go or may not move, for more experts than the slots hold, in a capture, and in a signal handler
  // that interrupted a move of this thread. If a read fails, earlier batches of the move have been
  // entered.
  void move(std::span<const ExpertId> up, std::span<const ExpertId> down, Stream compute);

  std::vector<int32_t> slots_of() const;
  MoverStats stats() const;

 private:
  // kMoving: a move() runs, without the lock. No other method changes batch or slots meanwhile.
  enum class State : uint8_t { kIdle, kFetching, kFetched, kCopying, kMoving };

  void want(ExpertId id);
  void forget(ExpertId id);
  void choose();
  int64_t to_go() const;
  void work();
  size_t fetch(std::exception_ptr& failure);
  void send(Stream compute);
  int32_t enter(Stream compute);
  void begin_move(const Runtime& runtime);
  void end_move();
  void check_named(std::span<const ExpertId> up, std::span<const ExpertId> down) const;

  std::shared_ptr<Driver> driver_;
  std::weak_ptr<Engine> engine_;  // computes the experts that are not on the device
  MoverOptions options_;
  int32_t experts_;  // of a layer
  int64_t record_bytes_;
  OwnedStream copy_;
  OwnedEvent copied_, switched_, arrived_;
  PinnedMemory staging_;  // [batch][record bytes]
  PinnedMemory table_;    // as the device's

  // The experts that are wanted on the device. They have a lock of their own, since host nodes take
  // it: no thread that waits for the device may hold it.
  mutable std::mutex wanted_mutex_;
  std::unique_ptr<Policy> wanted_;
  std::vector<int64_t> wanted_since_;  // by expert: the forward of its layer; -1: not wanted
  int32_t capacity_;                   // how many may be wanted
  int32_t wanted_count_ = 0;
  std::vector<int64_t> forwards_;  // of each layer
  std::vector<int32_t> distinct_;
  std::vector<bool> seen_;  // of a layer's experts, by one forward

  // The experts that are on the device. This lock is taken before wanted_mutex_.
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  State state_ = State::kIdle;
  std::thread::id moving_;  // the thread of the move under way
  bool ending_ = false;
  std::vector<ExpertId> up_, down_;  // of the batch under way
  std::vector<int32_t> into_;        // the slot of each of up_
  std::vector<int32_t> slots_of_;
  std::vector<int32_t> spare_;
  MoverStats stats_;
  std::thread worker_;  // reads records, and may wait for the disk
};

}  // namespace torch_mesh
