// Embedding tables whose rows are read from files when they are looked up.
//
// A table is a list of stretches of rows in files, as a checkpoint or a store has them. gather()
// reads each distinct row once, unless the table's cache has it. Reads go into a fixed number of
// staging buffers, so a gather that is interrupted or times out leaves nothing that a late read
// could write over.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_set>
#include <vector>

#include "base/aligned_memory.h"
#include "base/error.h"
#include "base/owner_process.h"
#include "base/runtime.h"
#include "io/reader.h"
#include "store/extent.h"
#include "store/source.h"
#include "tables/row_cache.h"
#include "tables/row_codes.h"

namespace torch_mesh {

// Consecutive rows in a file.
struct RowStretch {
  int32_t file;
  int64_t offset;  // of the first
  int64_t rows;
};

struct Table {
  std::string name;                // of the parameter, for errors
  int64_t row_bytes = 0;           // in the file
  std::optional<RowCodes> codes;   // none: a row is its values
  int64_t stride = 0;              // bytes from one row to the next
  bool has_checksums = false;      // each row is followed by its own, see row_checksum()
  std::array<uint8_t, 16> salt{};  // hashed with each row, so that no row of another table passes
  std::vector<RowStretch> stretches;
  int64_t cache_bytes = 0;
};

// The checksum of a row in a store: XXH3-64 as of a record, with the table's salt in the place of
// the store's id.
uint64_t row_checksum(const std::array<uint8_t, 16>& salt, int64_t row, const std::byte* bytes,
                      int64_t row_bytes);

// The bytes of a row in a store: its own, its checksum and zeros. A power of two up to a sector, so
// that it never crosses one, or whole sectors.
int64_t padded_row_bytes(int64_t row_bytes);

// Turns rows as a checkpoint has them, one after the other, into rows of a store.
void pad_rows(const std::array<uint8_t, 16>& salt, int64_t first_row, int64_t row_bytes,
              std::span<const std::byte> rows, std::span<std::byte> padded);

struct TablesOptions {
  std::vector<File> files;
  std::vector<Table> tables;
  bool verify = true;                         // compare the checksums of rows that have them
  std::chrono::milliseconds timeout{30'000};  // of a gather that makes no progress
  ReaderOptions reader;
};

struct TableStats {
  int64_t gathers;
  int64_t lookups;     // ids
  int64_t distinct;    // of those, in each gather
  int64_t hits;        // of those, in the cache
  int64_t reads;       // of those, from files; the others were being read already
  int64_t bytes_read;  // by gathers and prefetches, whole blocks
  int64_t prefetches;  // rows
  int64_t failed;      // reads
  int64_t wait_nanoseconds;
};

class Tables {
 public:
  // Throws Error(kInvalid) for tables that do not lie within their files, what open_reader()
  // throws, and std::bad_alloc.
  Tables(TablesOptions options, const Runtime& runtime);
  ~Tables();  // waits for reads that are under way
  Tables(const Tables&) = delete;
  Tables& operator=(const Tables&) = delete;

  // Writes the values of rows `ids` of a table, each within [0, rows(table)), one after the other
  // to `out`, which is aligned for them. Throws Error(kRead), (kChecksum), (kTimeout),
  // (kInterrupted), (kClosed) or (kForked); later gathers work again once the cause is gone.
  void gather(int32_t table, std::span<const int64_t> ids, std::byte* out);
  // Hint: begins to read the rows that the cache lacks into it, as many as there are buffers for.
  // Waits for nothing, and drops failed reads.
  void prefetch(int32_t table, std::span<const int64_t> ids);

  // Ends gathers that wait, with Error(kClosed); waits for nothing. Throws Error(kForked).
  void close();
  // Throws Error(kForked) in a child of the process that opened them.
  void check_process() const;

  int32_t tables() const { return static_cast<int32_t>(options_.tables.size()); }
  int64_t rows(int32_t table) const { return first_rows_[table].back(); }
  const std::optional<RowCodes>& codes(int32_t table) const { return options_.tables[table].codes; }
  int64_t value_bytes(int32_t table) const;  // of a row as gather() writes it
  int64_t cache_rows(int32_t table) const { return caches_[table].capacity(); }
  int64_t memory_bytes() const;  // of caches and staging buffers
  std::chrono::milliseconds timeout() const { return options_.timeout; }
  const Reader& reader() const { return *reader_; }
  TableStats stats(int32_t table) const;
  void reset_stats();

 private:
  using Lock = std::unique_lock<std::mutex>;
  static constexpr int32_t kRowsPerRead = 16;
  static_assert(kRowsPerRead <= kMaxPieces);

  struct Gather;
  class Begun;
  // One request: up to kRowsPerRead rows, each a piece with a buffer of its own.
  struct Read {
    enum class State : uint8_t { kFree, kUnderWay, kLanded };
    State state = State::kFree;
    Gather* owner = nullptr;  // none: a prefetch, or its gather has ended
    uint32_t generation = 0;
    int32_t table = 0;
    int32_t count = 0;
    std::array<int64_t, kRowsPerRead> rows;
    std::array<int32_t, kRowsPerRead> groups;  // of its gather; -1: a prefetch
    ReadResult result{};

    bool is_prefetch() const { return count > 0 && groups[0] < 0; }
  };

  Extent extent_of(int32_t table, int64_t row) const;
  int64_t bytes_on_disk(int32_t table) const;  // of a row
  std::byte* buffer(int32_t read, int32_t index) const;
  Piece piece_of(int32_t read, int32_t index) const;
  ReadRequest request_for(int32_t read) const;
  const std::byte* row_of(int32_t read, int32_t index) const;  // that has been read
  bool checksum_matches(int32_t read, int32_t index) const;

  // Called with the lock held.
  bool start(Gather& gather, Lock& lock);
  bool may_take_read(const Gather& gather) const;
  bool take(Gather& gather, int32_t group, Begun& begun);
  void release(int32_t read);
  void wait(const Gather& gather, Lock& lock);
  void finish(Gather& gather, Lock& lock);
  void abandon(const Gather& gather);

  void copy_rows(Gather& gather, int32_t read) const;  // without the lock
  void on_read(const ReadResult& result);
  void keep_prefetched(int32_t read);
  std::string describe(int32_t table, int64_t row) const;
  Error read_error(int32_t read) const;
  Error checksum_error(int32_t table, int64_t row) const;

  const TablesOptions options_;
  const Runtime runtime_;
  const OwnerProcess owner_;
  std::vector<std::vector<int64_t>> first_rows_;  // by table: of each stretch, and behind the last

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool closed_ = false;
  int64_t prefetches_ended_ = 0;
  std::vector<RowCache> caches_;                          // by table
  std::vector<TableStats> stats_;                         // by table
  std::vector<std::unordered_set<int64_t>> prefetching_;  // by table: rows
  std::vector<Read> reads_;
  std::vector<int32_t> free_reads_;
  int32_t without_reads_ = 0;  // gathers that wait for a read and have none under way

  int64_t buffer_bytes_ = 0;
  AlignedMemory staging_;
  Owned<Reader> reader_;  // last: its thread uses all of the above
};

}  // namespace torch_mesh
