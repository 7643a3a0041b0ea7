#include "tables/tables.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "base/interrupts.h"
#include "base/read_error.h"
#include "store/record.h"

namespace torch_mesh {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kChecksumBytes = sizeof(uint64_t);
constexpr int64_t kSector = 512;
// Buffers to read into: enough reads to keep a disk busy, in little memory.
constexpr int64_t kStagingBytes = 8 << 20;
constexpr int64_t kMaxReads = 64, kMinReads = 2;
// Each row takes one latency of the disk, so many are under way at a time.
constexpr int32_t kDepth = 128, kThreads = 16;
// Groups that are looked up before others get the lock.
constexpr int32_t kLookedUpAtOnce = 4096;

void check(const TablesOptions& options) {
  if (options.tables.empty()) throw_invalid("there are no tables; give one or more");
  for (const Table& table : options.tables) {
    const int64_t bytes = table.row_bytes + (table.has_checksums ? kChecksumBytes : 0);
    if (table.row_bytes < 1 || table.row_bytes > INT32_MAX || table.stride < bytes) {
      throw_invalid(table.name, ": rows of ", table.row_bytes, " bytes in steps of ", table.stride,
                    "; a row takes 1 byte or more, a step at least ", bytes);
    }
    if (table.codes && table.row_bytes != coded_row_bytes(table.codes->format, table.codes->dim)) {
      throw_invalid(table.name, ": rows of ", table.codes->dim, " values in ",
                    format_name(table.codes->format), " take ",
                    coded_row_bytes(table.codes->format, table.codes->dim), " bytes, not ",
                    table.row_bytes);
    }
    if (table.stretches.empty()) throw_invalid(table.name, " has no rows");
    int64_t rows = 0;
    for (const RowStretch& stretch : table.stretches) {
      if (stretch.file < 0 || stretch.file >= std::ssize(options.files)) {
        throw_invalid(table.name, " names file ", stretch.file, " of ", options.files.size());
      }
      const File& file = options.files[stretch.file];
      if (stretch.offset < 0 || stretch.rows < 1 || bytes > file.bytes ||
          stretch.offset > file.bytes - bytes ||
          stretch.rows - 1 > (file.bytes - stretch.offset - bytes) / table.stride) {
        throw_invalid(table.name, ": ", stretch.rows, " rows from offset ", stretch.offset,
                      " on do not lie within ", file.path);
      }
      rows += stretch.rows;
    }
    if (table.has_checksums && rows > INT32_MAX) {
      throw_invalid(table.name, " has ", rows, " rows with checksums; at most ", INT32_MAX,
                    " are allowed");
    }
  }
}

std::vector<int64_t> first_rows_of(const Table& table) {
  std::vector<int64_t> first{0};
  for (const RowStretch& stretch : table.stretches) first.push_back(first.back() + stretch.rows);
  return first;
}

int64_t nanoseconds_since(Clock::time_point begin) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin).count();
}

}  // namespace

uint64_t row_checksum(const std::array<uint8_t, 16>& salt, int64_t row, const std::byte* bytes,
                      int64_t row_bytes) {
  return record_checksum(salt, 0, static_cast<int32_t>(row), bytes, row_bytes);
}

int64_t padded_row_bytes(int64_t row_bytes) {
  const int64_t bytes = row_bytes + kChecksumBytes;
  if (bytes > kSector) return round_up(bytes, kSector);
  int64_t padded = 2 * kChecksumBytes;
  while (padded < bytes) padded *= 2;
  return padded;
}

void pad_rows(const std::array<uint8_t, 16>& salt, int64_t first_row, int64_t row_bytes,
              std::span<const std::byte> rows, std::span<std::byte> padded) {
  const int64_t stride = padded_row_bytes(row_bytes), count = std::ssize(rows) / row_bytes;
  if (count * row_bytes != std::ssize(rows) || count * stride != std::ssize(padded) ||
      first_row < 0 || count > INT32_MAX - first_row) {
    throw_invalid(rows.size(), " bytes of rows of ", row_bytes, " from row ", first_row,
                  " do not make ", padded.size(), " bytes of a store, whose tables have at most ",
                  INT32_MAX, " rows");
  }
  for (int64_t index = 0; index < count; ++index) {
    const std::byte* from = rows.data() + index * row_bytes;
    std::byte* to = padded.data() + index * stride;
    const uint64_t checksum = row_checksum(salt, first_row + index, from, row_bytes);
    std::memcpy(to, from, static_cast<size_t>(row_bytes));
    std::memcpy(to + row_bytes, &checksum, kChecksumBytes);
    std::memset(to + row_bytes + kChecksumBytes, 0,
                static_cast<size_t>(stride - row_bytes - kChecksumBytes));
  }
}

// One call of gather(). Its ids are sorted, so that each distinct row is one group of equal ids.
struct Tables::Gather {
  struct Wanted {
    int64_t row;
    int64_t position;
  };

  Gather(const Tables& tables, int32_t table, std::span<const int64_t> ids, std::byte* out)
      : table(table),
        codes(tables.codes(table)),
        out(out),
        value_bytes(tables.value_bytes(table)),
        wanted(ids.size()) {
    for (size_t position = 0; position < ids.size(); ++position) {
      wanted[position] = {ids[position], static_cast<int64_t>(position)};
    }
    std::sort(wanted.begin(), wanted.end(), [](const Wanted& one, const Wanted& other) {
      return one.row < other.row || (one.row == other.row && one.position < other.position);
    });
    for (size_t index = 0; index < wanted.size(); ++index) {
      if (index == 0 || wanted[index].row != wanted[index - 1].row) {
        begins.push_back(static_cast<int64_t>(index));
      }
    }
    begins.push_back(static_cast<int64_t>(wanted.size()));
    landed.reserve(kMaxReads);
  }

  int32_t groups() const { return static_cast<int32_t>(begins.size()) - 1; }
  int64_t row(int32_t group) const { return wanted[begins[group]].row; }
  bool has_more() const { return next < groups() || !again.empty(); }
  bool is_done() const { return !has_more() && joined.empty() && under_way == 0; }

  // Writes the values of a row for all ids of its group. `bytes`: the row as it is in the file.
  void copy(int32_t group, const std::byte* bytes) {
    int64_t index = begins[group];
    if (codes) {
      std::byte* made = to(index++);
      decode_row(*codes, bytes, made);
      bytes = made;
    }
    for (; index < begins[group + 1]; ++index) {
      std::memcpy(to(index), bytes, static_cast<size_t>(value_bytes));
    }
  }
  std::byte* to(int64_t index) const { return out + wanted[index].position * value_bytes; }

  const int32_t table;
  const std::optional<RowCodes>& codes;
  std::byte* const out;
  const int64_t value_bytes;
  std::vector<Wanted> wanted;
  std::vector<int64_t> begins;  // by group, in `wanted`; and the end

  int32_t next = 0;                 // the first group that was not looked up
  std::vector<int32_t> again;       // groups to be looked up again
  std::vector<int32_t> joined;      // groups whose rows a prefetch reads
  int64_t joined_at = 0;            // prefetches_ended_ when they were
  std::vector<int32_t> read_twice;  // groups whose checksum was wrong once
  int32_t under_way = 0;            // reads, those that have landed included
  std::vector<int32_t> landed;      // reads that finish() has to see
  Clock::time_point progress = Clock::now();
};

// Reads that are being filled with rows, under the lock. Reads that are not submitted are released.
class Tables::Begun {
 public:
  Begun(Tables& tables, int32_t table, Gather* owner)
      : tables_(tables), table_(table), owner_(owner) {}
  ~Begun() {
    for (const int32_t read : reads_) tables_.release(read);
  }
  Begun(const Begun&) = delete;
  Begun& operator=(const Begun&) = delete;

  bool empty() const { return reads_.empty(); }
  bool is_full() const { return empty() || last().count == kRowsPerRead; }
  // Requires a free read, or room in the last one.
  void add(int64_t row, int32_t group) {
    if (is_full()) take_read();
    Read& read = tables_.reads_[reads_.back()];
    read.rows[read.count] = row;
    read.groups[read.count++] = group;
  }
  // Submits all of them, or none when it throws.
  void submit() {
    if (empty()) return;
    std::vector<ReadRequest> requests;
    requests.reserve(reads_.size());
    for (const int32_t read : reads_) requests.push_back(tables_.request_for(read));
    tables_.reader_->submit(requests);
    reads_.clear();
  }

 private:
  const Read& last() const { return tables_.reads_[reads_.back()]; }
  void take_read() {
    reads_.push_back(tables_.free_reads_.back());
    tables_.free_reads_.pop_back();
    Read& read = tables_.reads_[reads_.back()];
    const uint32_t generation = read.generation + 1;
    read = {};
    read.state = Read::State::kUnderWay;
    read.generation = generation;
    read.table = table_;
    read.owner = owner_;
    if (owner_ != nullptr) ++owner_->under_way;
  }

  Tables& tables_;
  const int32_t table_;
  Gather* const owner_;  // none: a prefetch
  std::vector<int32_t> reads_;
};

Tables::Tables(TablesOptions options, const Runtime& runtime)
    : options_(std::move(options)), runtime_(runtime) {
  check(options_);
  for (const Table& table : options_.tables) {
    first_rows_.push_back(first_rows_of(table));
    caches_.emplace_back(table.cache_bytes, first_rows_.back().back(), table.row_bytes);
    const int64_t on_disk = table.row_bytes + (table.has_checksums ? kChecksumBytes : 0);
    buffer_bytes_ = std::max(buffer_bytes_, round_up(on_disk, kRecordAlignment) + kRecordAlignment);
  }
  stats_.resize(options_.tables.size());
  prefetching_.resize(options_.tables.size());
  const int64_t bytes_of_read = buffer_bytes_ * kRowsPerRead;
  reads_.resize(
      static_cast<size_t>(std::clamp(kStagingBytes / bytes_of_read, kMinReads, kMaxReads)));
  for (int32_t read = 0; read < std::ssize(reads_); ++read) free_reads_.push_back(read);
  const auto staging = static_cast<size_t>(bytes_of_read * std::ssize(reads_));
  staging_ = aligned_memory(kRecordAlignment, staging);
  if (staging_ == nullptr) throw std::bad_alloc();

  ReaderOptions reader = options_.reader;
  reader.depth = kDepth;
  reader.threads = kThreads;
  const MemoryRegion region{staging_.get(), staging};
  reader_ = open_reader(reader, options_.files, {&region, 1},
                        [this](const ReadResult& result) { on_read(result); });
}

Tables::~Tables() = default;

int64_t Tables::value_bytes(int32_t table) const {
  const Table& of = options_.tables[table];
  return of.codes ? of.codes->value_bytes() : of.row_bytes;
}

int64_t Tables::memory_bytes() const {
  int64_t bytes = buffer_bytes_ * kRowsPerRead * std::ssize(reads_);
  for (const RowCache& cache : caches_) bytes += cache.bytes();
  return bytes;
}

TableStats Tables::stats(int32_t table) const {
  check_process();
  const Lock lock(mutex_);
  return stats_[table];
}

void Tables::reset_stats() {
  check_process();
  const Lock lock(mutex_);
  std::fill(stats_.begin(), stats_.end(), TableStats{});
}

void Tables::check_process() const { owner_.check("these tables"); }

void Tables::close() {
  check_process();
  const Lock lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

void Tables::gather(int32_t table, std::span<const int64_t> ids, std::byte* out) {
  check_process();
  Gather gather(*this, table, ids, out);
  Lock lock(mutex_);
  TableStats& stats = stats_[table];
  ++stats.gathers;
  stats.lookups += std::ssize(ids);
  stats.distinct += gather.groups();
  try {
    while (!gather.is_done()) {
      if (closed_) throw Error(ErrorKind::kClosed, "the tables are closed; open the model anew");
      const bool paused = start(gather, lock);
      if (!paused && gather.landed.empty() && !gather.is_done()) wait(gather, lock);
      finish(gather, lock);
    }
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    abandon(gather);
    throw;
  }
}

void Tables::prefetch(int32_t table, std::span<const int64_t> ids) {
  check_process();
  {
    const Lock lock(mutex_);
    if (closed_ || caches_[table].capacity() == 0) return;
    // Half of the buffers stay free for a gather that comes now.
    const size_t reserved = reads_.size() / 2;
    Begun begun(*this, table, nullptr);
    for (const int64_t row : ids) {
      if (caches_[table].contains(row) || prefetching_[table].contains(row)) continue;
      if (begun.is_full() && free_reads_.size() <= reserved) break;
      begun.add(row, -1);
      prefetching_[table].insert(row);
      ++stats_[table].prefetches;
    }
    begun.submit();
  }
  reader_->flush();
}

// Looks groups up and begins to read the rows that are not there. True if it stops although it
// could go on, so that other threads get the lock.
bool Tables::start(Gather& gather, Lock& lock) {
  if (!gather.joined.empty() && gather.joined_at != prefetches_ended_) {
    gather.again.insert(gather.again.end(), gather.joined.begin(), gather.joined.end());
    gather.joined.clear();
  }
  bool has_begun = false, paused = false;
  {
    Begun begun(*this, gather.table, &gather);
    // A group that needs a read while it may not have one is looked up again later.
    bool lacks_read = false;
    for (int32_t looked_up = 0; gather.has_more() && looked_up < kLookedUpAtOnce; ++looked_up) {
      const bool from_again = !gather.again.empty();
      lacks_read = !take(gather, from_again ? gather.again.back() : gather.next, begun);
      if (lacks_read) break;
      if (from_again) {
        gather.again.pop_back();
      } else {
        ++gather.next;
      }
    }
    has_begun = !begun.empty();
    paused = gather.has_more() && !lacks_read;
    begun.submit();
  }
  if (has_begun || paused) {
    gather.progress = Clock::now();
    lock.unlock();
    reader_->flush();
    lock.lock();
  }
  return paused;
}

// A gather that has reads under way leaves the free ones to gathers that have none.
bool Tables::may_take_read(const Gather& gather) const {
  return !free_reads_.empty() && (gather.under_way == 0 || without_reads_ == 0);
}

// Copies a row from the cache, or has it read. False if that takes a read that the gather may not
// have now.
bool Tables::take(Gather& gather, int32_t group, Begun& begun) {
  const int32_t table = gather.table;
  const int64_t row = gather.row(group);
  if (const std::byte* bytes = caches_[table].find(row)) {
    gather.copy(group, bytes);
    ++stats_[table].hits;
  } else if (prefetching_[table].contains(row)) {
    gather.joined.push_back(group);
    gather.joined_at = prefetches_ended_;
  } else if (begun.is_full() && !may_take_read(gather)) {
    return false;
  } else {
    begun.add(row, group);
    ++stats_[table].reads;
  }
  return true;
}

void Tables::release(int32_t read) {
  Read& ended = reads_[read];
  if (ended.is_prefetch()) {
    for (int32_t index = 0; index < ended.count; ++index) {
      prefetching_[ended.table].erase(ended.rows[index]);
    }
    ++prefetches_ended_;
  }
  if (ended.owner != nullptr) --ended.owner->under_way;
  ended.state = Read::State::kFree;
  ended.owner = nullptr;
  free_reads_.push_back(read);  // which has room for all
  changed_.notify_all();
}

// Waits until there is something to be done for the gather.
void Tables::wait(const Gather& gather, Lock& lock) {
  const auto begin = Clock::now();
  const auto deadline = gather.progress + options_.timeout;
  const auto can_go_on = [&] {
    return closed_ || !gather.landed.empty() || (gather.has_more() && may_take_read(gather)) ||
           (!gather.joined.empty() && gather.joined_at != prefetches_ended_);
  };
  struct Counted {
    Tables& tables;
    const int32_t gathers;
    Counted(Tables& tables, bool counts) : tables(tables), gathers(counts ? 1 : 0) {
      tables.without_reads_ += gathers;
    }
    ~Counted() {
      tables.without_reads_ -= gathers;
      if (gathers > 0) tables.changed_.notify_all();
    }
  } const counted(*this, gather.has_more() && gather.under_way == 0);
  if (!wait_interruptibly(lock, changed_, deadline, runtime_, "rows of a table are read",
                          can_go_on)) {
    throw Error(ErrorKind::kTimeout,
                "no row of " + options_.tables[gather.table].name + " was read within the " +
                    "time-out of " + std::to_string(options_.timeout.count()) +
                    " ms; is the disk healthy and is the file on a local disk?",
                {.file = options_.files[options_.tables[gather.table].stretches[0].file].path});
  }
  stats_[gather.table].wait_nanoseconds += nanoseconds_since(begin);
}

// Copies rows that have landed to the output and into the cache.
void Tables::finish(Gather& gather, Lock& lock) {
  if (gather.landed.empty()) return;
  std::vector<int32_t> landed = gather.landed;
  gather.landed.clear();
  gather.progress = Clock::now();
  lock.unlock();
  const size_t twice = gather.again.size();
  for (const int32_t read : landed) copy_rows(gather, read);
  lock.lock();
  for (const int32_t read : landed) {
    for (int32_t index = 0; index < reads_[read].count; ++index) {
      const bool wrong =
          std::find(gather.again.begin() + static_cast<int64_t>(twice), gather.again.end(),
                    reads_[read].groups[index]) != gather.again.end();
      // Another gather may have brought the same row.
      if (wrong || caches_[gather.table].contains(reads_[read].rows[index])) continue;
      caches_[gather.table].insert(reads_[read].rows[index], row_of(read, index));
    }
    release(read);
  }
}

// A row with a wrong checksum is read once more: one wrong read may be a passing fault of bus or
// memory, a second says that the disk holds other bytes.
void Tables::copy_rows(Gather& gather, int32_t read) const {
  const Read& landed = reads_[read];
  if (landed.result.error != 0) throw read_error(read);
  for (int32_t index = 0; index < landed.count; ++index) {
    const int32_t group = landed.groups[index];
    if (checksum_matches(read, index)) {
      gather.copy(group, row_of(read, index));
      continue;
    }
    std::vector<int32_t>& before = gather.read_twice;
    if (std::find(before.begin(), before.end(), group) != before.end()) {
      throw checksum_error(gather.table, landed.rows[index]);
    }
    before.push_back(group);
    gather.again.push_back(group);
    reader_->forget(extent_of(gather.table, landed.rows[index]));
  }
}

// Releases the reads of a gather that ends early; those under way are released when they land.
void Tables::abandon(const Gather& gather) {
  for (int32_t read = 0; read < std::ssize(reads_); ++read) {
    if (reads_[read].owner != &gather) continue;
    if (reads_[read].state == Read::State::kLanded) {
      release(read);
    } else {
      reads_[read].owner = nullptr;
    }
  }
}

// On the I/O thread.
void Tables::on_read(const ReadResult& result) {
  const auto number = static_cast<int32_t>(result.tag & UINT32_MAX);
  Read& read = reads_[number];
  const Lock lock(mutex_);
  read.result = result;
  TableStats& stats = stats_[read.table];
  if (result.error != 0) {
    ++stats.failed;
  } else {
    for (int32_t index = 0; index < read.count; ++index) {
      stats.bytes_read += piece_of(number, index).from.bytes;
    }
  }
  if (read.owner != nullptr) {
    read.state = Read::State::kLanded;
    read.owner->landed.push_back(number);  // which has room for all
    changed_.notify_all();
    return;
  }
  if (read.is_prefetch() && result.error == 0) keep_prefetched(number);
  release(number);
}

void Tables::keep_prefetched(int32_t read) {
  const Read& landed = reads_[read];
  RowCache& cache = caches_[landed.table];
  for (int32_t index = 0; index < landed.count; ++index) {
    const int64_t row = landed.rows[index];
    if (!cache.contains(row) && checksum_matches(read, index)) {
      cache.insert(row, row_of(read, index));
    }
  }
}

int64_t Tables::bytes_on_disk(int32_t table) const {
  const Table& of = options_.tables[table];
  return of.row_bytes + (of.has_checksums ? kChecksumBytes : 0);
}

Extent Tables::extent_of(int32_t table, int64_t row) const {
  const std::vector<int64_t>& first = first_rows_[table];
  const auto after = std::upper_bound(first.begin(), first.end(), row);
  const auto stretch = static_cast<size_t>(after - first.begin()) - 1;
  const Table& of = options_.tables[table];
  const RowStretch& in = of.stretches[stretch];
  return {in.file, in.offset + (row - first[stretch]) * of.stride, bytes_on_disk(table)};
}

std::byte* Tables::buffer(int32_t read, int32_t index) const {
  return staging_.get() + (int64_t{read} * kRowsPerRead + index) * buffer_bytes_;
}

// The read of a row: whole blocks of the reader's alignment.
Piece Tables::piece_of(int32_t read, int32_t index) const {
  const Extent row = extent_of(reads_[read].table, reads_[read].rows[index]);
  const int64_t alignment = reader_->alignment();
  const int64_t begin = row.offset / alignment * alignment, end = row.offset + row.bytes;
  const Extent from{row.file, begin, round_up(end, alignment) - begin};
  return {from, end - begin, buffer(read, index)};
}

ReadRequest Tables::request_for(int32_t read) const {
  const Read& of = reads_[read];
  ReadRequest request{};
  request.tag = uint64_t{of.generation} << 32 | static_cast<uint32_t>(read);
  request.urgency = Urgency::kDemand;
  request.pieces = of.count;
  for (int32_t index = 0; index < of.count; ++index) request.piece[index] = piece_of(read, index);
  return request;
}

const std::byte* Tables::row_of(int32_t read, int32_t index) const {
  const Extent row = extent_of(reads_[read].table, reads_[read].rows[index]);
  return buffer(read, index) + row.offset % reader_->alignment();
}

bool Tables::checksum_matches(int32_t read, int32_t index) const {
  const Read& landed = reads_[read];
  const Table& table = options_.tables[landed.table];
  if (!options_.verify || !table.has_checksums) return true;
  const std::byte* bytes = row_of(read, index);
  uint64_t stored;
  std::memcpy(&stored, bytes + table.row_bytes, kChecksumBytes);
  return stored == row_checksum(table.salt, landed.rows[index], bytes, table.row_bytes);
}

std::string Tables::describe(int32_t table, int64_t row) const {
  return "row " + std::to_string(row) + " of " + options_.tables[table].name;
}

Error Tables::read_error(int32_t read) const {
  const Read& failed = reads_[read];
  const ReadResult& result = failed.result;
  if (result.error == ECANCELED) {
    return Error(ErrorKind::kClosed, "the tables are closed; open the model anew");
  }
  int32_t index = 0;  // whose piece it was
  for (int32_t other = 0; other < failed.count; ++other) {
    const Extent from = piece_of(read, other).from;
    const bool inside = result.offset >= from.offset && result.offset < from.offset + from.bytes;
    if (from.file == result.file && inside) index = other;
  }
  const Extent row = extent_of(failed.table, failed.rows[index]);
  const std::string& file = options_.files[row.file].path;
  return torch_mesh::read_error(describe(failed.table, failed.rows[index]),
                                {.file = file, .offset = row.offset}, result.error);
}

Error Tables::checksum_error(int32_t table, int64_t row) const {
  const Extent at = extent_of(table, row);
  const std::string& file = options_.files[at.file].path;
  return Error(ErrorKind::kChecksum, wrong_checksum(describe(table, row), file, at.offset),
               {.file = file, .offset = at.offset});
}

}  // namespace torch_mesh
