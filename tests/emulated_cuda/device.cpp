// An emulated CUDA device for torch's CPU build. Tensors have device type "cuda" and live in host memory; kernels are
// the CPU's. What a program can notice of a GPU is emulated:
//
//   * Work is asynchronous. Every stream is a queue with a thread of its own. Queued work starts when the host
//     synchronizes, when the queue is full, or after EMULATED_CUDA_LAZY_MS, so that missing synchronization shows.
//   * Streams and events order work. Nothing else does.
//   * Copies from pinned memory read it when they run. Memory that the host overwrote meanwhile is reported.
//   * A process group as strict as NCCL's: it takes CUDA tensors only, `wait()` returns immediately, ranks whose
//     collectives do not match hang, and a collective that exceeds the timeout aborts the process.
//   * CUDA graphs: capture raises on what CUDA forbids, replay runs the recorded kernels on the recorded addresses.
//   * Counters of kernel launches and host synchronizations.
//
// Stream threads never touch Python, so a host thread may wait for them while it holds the GIL.
#include <ATen/ATen.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_cpu_dispatch.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/unfold_cpu_dispatch.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>
#include <sys/stat.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <fstream>
#include <iostream>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>

namespace {
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::IValue;
using c10::Storage;
using Time = std::chrono::steady_clock::time_point;
constexpr auto CUDA = c10::DeviceType::CUDA;
constexpr auto CPU = c10::DeviceType::CPU;

// -- settings, from the environment ------------------------------------------------------------------------------------

std::string env(const char* name, const char* fallback) {
  const char* value = getenv(name);
  return value ? value : fallback;
}

// Physical numbers of the visible devices. Read when first asked, as the CUDA driver does: a process forked from a server
// that has torch imported may still choose them.
const std::vector<int>& visible_devices() {
  static const std::vector<int> visible = [] {
    const int count = atoi(env("EMULATED_GPUS", "0").c_str());
    std::vector<int> found;
    const char* chosen = getenv("CUDA_VISIBLE_DEVICES");
    if (!chosen) {
      for (int i = 0; i < count; i++) found.push_back(i);
      return found;
    }
    std::stringstream list(chosen);
    for (std::string part; std::getline(list, part, ',');) {
      char* end = nullptr;
      const long number = strtol(part.c_str(), &end, 10);
      if (end == part.c_str() || number < 0 || number >= count) break;
      found.push_back(static_cast<int>(number));
    }
    return found;
  }();
  return visible;
}
DeviceIndex device_count() { return static_cast<DeviceIndex>(visible_devices().size()); }

std::chrono::steady_clock::duration lazy() {
  static const auto wait = std::chrono::duration<double, std::milli>(atof(env("EMULATED_CUDA_LAZY_MS", "50").c_str()));
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(wait);
}
constexpr size_t QUEUE_DEPTH = 1024;  // a launch blocks the host when so much is queued, as in CUDA
int64_t total_memory() {
  static const int64_t bytes = atoll(env("EMULATED_GPU_MEMORY", "17179869184").c_str());
  return bytes;
}

std::atomic<bool> bad_fork{false};
std::atomic<bool> used{false};

// A process has a context on a device once it used it; tests read the directory to see which processes have one.
void note_context(DeviceIndex device) {
  static std::array<std::atomic<bool>, 64> noted;
  used = true;
  if (noted[device].exchange(true)) return;
  const char* directory = getenv("EMULATED_CUDA_CONTEXTS");
  if (directory) std::ofstream(c10::str(directory, "/", getpid(), ".", visible_devices().at(device)));
}

// -- counters ------------------------------------------------------------------------------------------------------------

struct Sync {
  std::string what, line;
};
std::mutex counting;
int64_t launches = 0, syncs = 0;
std::map<std::string, int64_t> launches_by_name;
std::vector<Sync> sync_log;
std::vector<std::string> races;
PyObject* find_line = nullptr;  // a Python function that names the calling line
bool logging_syncs = false;
std::atomic<int> sync_debug_mode{0};

void count_launch(const std::string& name) {
  std::lock_guard<std::mutex> hold(counting);
  launches++;
  launches_by_name[name]++;
}

std::string calling_line() {
  if (!find_line || !Py_IsInitialized()) return "";
  pybind11::gil_scoped_acquire gil;
  try {
    return pybind11::cast<std::string>(pybind11::reinterpret_borrow<pybind11::object>(find_line)());
  } catch (...) {
    return "";
  }
}

// -- memory ------------------------------------------------------------------------------------------------------------

thread_local DeviceIndex current_device = 0;

struct MemoryUse {
  std::atomic<int64_t> current{0}, peak{0};
};
std::array<MemoryUse, 64> memory_use;

struct Block {
  int64_t bytes;
  DeviceIndex device;
};
std::mutex blocks_lock;
std::map<void*, Block> device_blocks;
std::map<const char*, size_t> pinned_blocks;

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> hold(blocks_lock);
  auto next = pinned_blocks.upper_bound(static_cast<const char*>(pointer));
  if (next == pinned_blocks.begin()) return false;
  --next;
  return static_cast<const char*>(pointer) < next->first + next->second;
}

void* new_block(size_t bytes) {
  void* block = aligned_alloc(64, (bytes + 63) / 64 * 64);
  TORCH_CHECK(block, "the host has no memory for an emulated device");
  memset(block, 0x7f, bytes);  // uninitialized memory must not look like zeros
  return block;
}

void drain_all();

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const DeviceIndex device = current_device;
    note_context(device);
    if (!bytes) return {nullptr, nullptr, &release, Device(CUDA, device)};
    auto& use = memory_use[device];
    if (use.current + static_cast<int64_t>(bytes) > total_memory()) drain_all();  // queued work holds memory that is freed
    if (use.current + static_cast<int64_t>(bytes) > total_memory()) {
      const std::string message = c10::str("CUDA out of memory. Tried to allocate ", bytes / 1048576.0, " MiB. GPU ", int(device),
          " has a total capacity of ", total_memory() / 1048576.0, " MiB of which ", (total_memory() - use.current) / 1048576.0, " MiB is free.");
      throw c10::OutOfMemoryError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, message);
    }
    void* block = new_block(bytes);
    use.current += bytes;
    if (use.current > use.peak) use.peak = use.current.load();
    std::lock_guard<std::mutex> hold(blocks_lock);
    device_blocks[block] = {static_cast<int64_t>(bytes), device};
    return {block, block, &release, Device(CUDA, device)};
  }
  static void release(void* block) {
    if (!block) return;
    {
      std::lock_guard<std::mutex> hold(blocks_lock);
      auto found = device_blocks.find(block);
      if (found != device_blocks.end()) {
        memory_use[found->second.device].current -= found->second.bytes;
        device_blocks.erase(found);
      }
    }
    free(block);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, nullptr, &release, Device(CPU)};
    char* block = static_cast<char*>(new_block(bytes));
    std::lock_guard<std::mutex> hold(blocks_lock);
    pinned_blocks[block] = bytes;
    return {block, block, &release, Device(CPU)};
  }
  static void release(void* block) {
    if (!block) return;
    {
      std::lock_guard<std::mutex> hold(blocks_lock);
      pinned_blocks.erase(static_cast<char*>(block));
    }
    free(block);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};
DeviceAllocator device_allocator;
PinnedAllocator pinned_allocator;

// -- kernels under way ---------------------------------------------------------------------------------------------------

// A tensor as a kernel sees it: memory and layout at the time of the launch.
struct Operand {
  Storage storage;
  c10::weak_intrusive_ptr<c10::StorageImpl> weak;  // instead of `storage`, for inputs of a captured graph
  const void* address;
  c10::SmallVector<int64_t, 6> sizes, strides;
  int64_t offset;
  caffe2::TypeMeta dtype;
  bool wrapped_number;

  explicit Operand(const Tensor& t)
      : storage(t.storage()), weak(t.storage().getWeakStorageImpl()), address(t.storage().data()), sizes(t.sizes().begin(), t.sizes().end()),
        strides(t.strides().begin(), t.strides().end()), offset(t.storage_offset()), dtype(t.dtype()),
        wrapped_number(t.unsafeGetTensorImpl()->is_wrapped_number()) {}

  // The same memory as a CPU tensor. The caller keeps the storage alive.
  Tensor on_host(const Storage& held) const {
    auto impl = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), held.nbytes(),
        c10::DataPtr(const_cast<void*>(held.data()), Device(CPU)), nullptr, false);
    Tensor out = at::detail::make_tensor<c10::TensorImpl>(Storage(impl), c10::DispatchKeySet(c10::DispatchKey::CPU), dtype);
    out.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
    if (wrapped_number) out.unsafeGetTensorImpl()->set_wrapped_number(true);
    return out;
  }
};

struct Kernel {
  std::string name;
  std::vector<Operand> operands;
  std::function<void(std::vector<Tensor>&)> body;

  void run() {
    std::vector<Storage> held;
    std::vector<Tensor> tensors;
    for (auto& operand : operands) {
      Storage storage = operand.storage;
      if (!storage) {
        auto locked = operand.weak.lock();
        TORCH_CHECK(locked, "CUDA graph replay: an input of ", name, " was freed after capture. Copy new inputs into the captured tensors.");
        storage = Storage(std::move(locked));
        TORCH_CHECK(storage.data() == operand.address, "CUDA graph replay: an input of ", name, " moved to another address after capture.");
      }
      held.push_back(storage);
      tensors.push_back(operand.on_host(storage));
    }
    body(tensors);
  }
};

// -- streams ---------------------------------------------------------------------------------------------------------------

std::mutex error_lock;
std::string device_error;  // sticky, as in CUDA: every later synchronization raises it

void raise_device_error() {
  std::lock_guard<std::mutex> hold(error_lock);
  TORCH_CHECK(device_error.empty(), device_error);
}

void note_error(const std::string& what) {
  std::lock_guard<std::mutex> hold(error_lock);
  if (device_error.empty()) device_error = "CUDA error: " + what;
}

// Set when the process ends: its streams' threads must not run kernels while torch's own objects are destroyed.
std::atomic<bool> exiting{false};
std::atomic<int> kernels_running{0};

void stop_streams() {
  exiting = true;
  const auto most = std::chrono::steady_clock::now() + std::chrono::seconds(2);  // a collective may wait forever
  while (kernels_running && std::chrono::steady_clock::now() < most) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

class Stream {
 public:
  const DeviceIndex device;
  const c10::StreamId id;
  Stream(DeviceIndex device, c10::StreamId id) : device(device), id(id) {}

  // Queue work; the number by which to wait for it.
  uint64_t enqueue(std::function<void()> work) {
    TORCH_CHECK(!bad_fork, "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' start method");
    note_context(device);
    std::unique_lock<std::mutex> hold(lock_);
    if (!started_) {
      std::thread([this] { loop(); }).detach();
      started_ = true;
    }
    queue_.push_back({++last_, std::chrono::steady_clock::now(), std::move(work)});
    const uint64_t number = last_;
    changed_.notify_all();
    while (queue_.size() > QUEUE_DEPTH && !exiting) finished_.wait_for(hold, PATIENCE);
    return number;
  }
  uint64_t last() {
    std::lock_guard<std::mutex> hold(lock_);
    return last_;
  }
  bool done(uint64_t number) {
    std::lock_guard<std::mutex> hold(lock_);
    demand(number);  // whoever polls expects progress
    return done_ >= number;
  }
  void wait(uint64_t number) {
    std::unique_lock<std::mutex> hold(lock_);
    demand(number);
    while (done_ < number && !exiting) finished_.wait_for(hold, PATIENCE);
  }

 private:
  struct Entry {
    uint64_t number;
    Time queued;
    std::function<void()> work;
  };
  static constexpr std::chrono::milliseconds PATIENCE{200};  // how soon waiting ends when the process does
  std::mutex lock_;
  std::condition_variable changed_, finished_;
  std::deque<Entry> queue_;
  uint64_t last_ = 0, done_ = 0, wanted_ = 0;
  bool started_ = false;

  void demand(uint64_t number) {
    if (number > wanted_) {
      wanted_ = number;
      changed_.notify_all();
    }
  }
  void loop() {
    at::NoGradGuard no_grad;
    at::AutoDispatchBelowADInplaceOrView below;
    std::unique_lock<std::mutex> hold(lock_);
    while (true) {
      if (queue_.empty()) {
        changed_.wait(hold);
        continue;
      }
      const Time starts = queue_.front().queued + lazy();
      if (wanted_ < queue_.front().number && queue_.size() <= QUEUE_DEPTH && std::chrono::steady_clock::now() < starts) {
        changed_.wait_until(hold, starts);
        continue;
      }
      kernels_running++;
      if (exiting) {
        kernels_running--;
        changed_.wait(hold, [] { return false; });
      }
      Entry entry = std::move(queue_.front());
      hold.unlock();
      try {
        entry.work();
      } catch (const c10::Error& error) {
        note_error(error.what_without_backtrace());
      } catch (const std::exception& error) {
        note_error(error.what());
      }
      entry.work = nullptr;  // lets go of its memory before anybody is told that it is done
      kernels_running--;
      hold.lock();
      queue_.pop_front();
      done_ = entry.number;
      finished_.notify_all();
    }
  }
};

struct Event {
  std::mutex lock;
  Stream* stream = nullptr;
  uint64_t number = 0;
  uint64_t capture = 0;  // the capture it was recorded in
  std::map<Stream*, uint64_t> clock;
  std::shared_ptr<std::atomic<double>> milliseconds = std::make_shared<std::atomic<double>>(-1.0);
};

constexpr int POOL = 8;  // streams of a device besides its default one
Stream& stream_of(DeviceIndex device, c10::StreamId id) {
  static std::mutex lock;
  static std::map<std::pair<int, c10::StreamId>, std::unique_ptr<Stream>>& streams = *new std::map<std::pair<int, c10::StreamId>, std::unique_ptr<Stream>>();
  TORCH_CHECK(device >= 0 && device < device_count(), "CUDA error: invalid device ordinal");
  std::lock_guard<std::mutex> hold(lock);
  auto& found = streams[{device, id}];
  if (!found) found = std::make_unique<Stream>(device, id);
  return *found;
}
Stream& stream_of(const c10::Stream& stream) { return stream_of(stream.device_index(), stream.id()); }

thread_local std::array<c10::StreamId, 64> current_streams{};
Stream& current_stream(DeviceIndex device) { return stream_of(device, current_streams.at(device)); }

constexpr int COMMUNICATION = 1000;  // stream on which collectives run
void drain_device(DeviceIndex device) {
  for (int id = 0; id <= POOL; id++) {
    auto& stream = stream_of(device, id);
    stream.wait(stream.last());
  }
  auto& stream = stream_of(device, COMMUNICATION);
  stream.wait(stream.last());
}
void drain_all() {
  for (DeviceIndex device = 0; device < device_count(); device++) drain_device(device);
}

// -- graphs ------------------------------------------------------------------------------------------------------------------

struct Capture {
  uint64_t number;
  Stream* origin;
  std::string broken;  // why it can no longer succeed
  std::vector<std::shared_ptr<Kernel>> kernels;
  std::map<Stream*, std::map<Stream*, uint64_t>> clocks;  // what each joined stream has seen of the others
  std::set<const c10::StorageImpl*> own;                  // memory allocated during the capture
};
std::mutex capture_lock;
std::shared_ptr<Capture> capturing;
uint64_t captures = 0;

bool is_capturing(Stream& stream) {
  std::lock_guard<std::mutex> hold(capture_lock);
  return capturing && capturing->clocks.count(&stream);
}

void forbid_in_capture(const std::string& what) {
  std::lock_guard<std::mutex> hold(capture_lock);
  if (!capturing) return;
  capturing->broken = what;
  TORCH_CHECK(false, "CUDA error: operation not permitted when stream is capturing (", what, ")");
}

// A point at which the host waits for a device. `asked` is true where the program said so itself.
void host_sync(const std::string& what, bool asked = false) {
  forbid_in_capture(what);
  if (!asked && sync_debug_mode == 2) TORCH_CHECK(false, "called a synchronizing CUDA operation (", what, ")");
  if (!asked && sync_debug_mode == 1) TORCH_WARN("called a synchronizing CUDA operation (", what, ")");
  std::string line = logging_syncs ? calling_line() : "";
  std::lock_guard<std::mutex> hold(counting);
  syncs++;
  if (logging_syncs) sync_log.push_back({what, line});
}

void wait_for(Stream& stream) {
  stream.wait(stream.last());
  raise_device_error();
}

void launch(Stream& stream, std::shared_ptr<Kernel> kernel, bool count = true) {
  if (count) count_launch(kernel->name);
  {
    std::lock_guard<std::mutex> hold(capture_lock);
    if (capturing && capturing->clocks.count(&stream)) {
      capturing->clocks[&stream][&stream]++;
      capturing->kernels.push_back(std::move(kernel));
      return;
    }
  }
  stream.enqueue([kernel = std::move(kernel)]() mutable {
    kernel->run();
    kernel.reset();
  });
}

void record_event(Event& event, Stream& stream) {
  std::lock_guard<std::mutex> hold(event.lock);
  event.stream = &stream;
  {
    std::lock_guard<std::mutex> hold_capture(capture_lock);
    if (capturing && capturing->clocks.count(&stream)) {
      event.capture = capturing->number;
      event.clock = capturing->clocks[&stream];
      return;
    }
  }
  event.capture = 0;
  event.milliseconds = std::make_shared<std::atomic<double>>(-1.0);
  event.number = stream.enqueue([at = event.milliseconds] {
    *at = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
  });
}

void wait_event(Event& event, Stream& stream) {
  std::lock_guard<std::mutex> hold(event.lock);
  if (!event.stream) return;
  {
    std::lock_guard<std::mutex> hold_capture(capture_lock);
    const bool inside = capturing && event.capture == capturing->number;
    if (inside) {
      auto& clock = capturing->clocks[&stream];  // joins the capture
      for (auto& [other, seen] : event.clock) clock[other] = std::max(clock[other], seen);
      return;
    }
    if (capturing && capturing->clocks.count(&stream)) {
      capturing->broken = "wait for an event recorded outside of the capture";
      TORCH_CHECK(false, "CUDA error: dependency created on uncaptured work in another stream");
    }
    TORCH_CHECK(!event.capture, "CUDA error: the event was recorded in a capture and can be waited for only there");
  }
  if (event.stream == &stream) return;
  stream.enqueue([other = event.stream, number = event.number] { other->wait(number); });
}

struct Graph {
  std::vector<std::shared_ptr<Kernel>> kernels;
  bool captured = false;

  void begin() {
    auto& stream = current_stream(current_device);
    TORCH_CHECK(stream.id != 0, "CUDA graphs must be captured on a non-default stream.");
    std::lock_guard<std::mutex> hold(capture_lock);
    TORCH_CHECK(!capturing, "a capture is under way already");
    capturing = std::make_shared<Capture>();
    capturing->number = ++captures;
    capturing->origin = &stream;
    capturing->clocks[&stream];
  }
  void end() {
    std::shared_ptr<Capture> done;
    {
      std::lock_guard<std::mutex> hold(capture_lock);
      TORCH_CHECK(capturing, "no capture is under way");
      done = std::move(capturing);
      capturing = nullptr;
    }
    TORCH_CHECK(done->broken.empty(), "CUDA error: operation failed due to a previous error during capture (", done->broken, ")");
    for (auto& [stream, clock] : done->clocks)
      TORCH_CHECK(done->clocks[done->origin][stream] >= clock[stream], "CUDA error: capturing stream has unjoined work");
    kernels = std::move(done->kernels);
    for (auto& kernel : kernels)
      for (auto& operand : kernel->operands)
        if (!done->own.count(operand.storage.unsafeGetStorageImpl())) operand.storage = Storage();  // the caller owns inputs
    captured = true;
  }
  void replay() {
    TORCH_CHECK(captured, "Called CUDAGraph::replay without a preceding successful capture.");
    for (auto& kernel : kernels)
      for (auto& operand : kernel->operands)
        TORCH_CHECK(operand.storage || !operand.weak.expired(), "CUDA graph replay: an input of ", kernel->name,
                    " was freed after capture. Copy new inputs into the captured tensors.");
    count_launch("graph");
    current_stream(current_device).enqueue([all = kernels] {
      for (auto& kernel : all) kernel->run();
    });
  }
  void reset() {
    kernels.clear();
    captured = false;
  }
};

// -- device guard and hooks ------------------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static Event& event_of(void* event) { return *static_cast<Event*>(event); }
  c10::DeviceType type() const override { return CUDA; }
  Device exchangeDevice(Device d) const override {
    Device old(CUDA, current_device);
    current_device = d.index();
    return old;
  }
  Device getDevice() const override { return Device(CUDA, current_device); }
  void setDevice(Device d) const override { current_device = d.index(); }
  void uncheckedSetDevice(Device d) const noexcept override { current_device = d.index(); }
  c10::Stream getStream(Device d) const override { return c10::Stream(c10::Stream::UNSAFE, d, current_streams[d.index()]); }
  c10::Stream getDefaultStream(Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getNewStream(Device d, int) const override {
    static std::atomic<int> next{0};
    const DeviceIndex index = d.has_index() ? d.index() : current_device;
    return c10::Stream(c10::Stream::UNSAFE, Device(CUDA, index), 1 + next++ % POOL);
  }
  c10::Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    c10::Stream old = getStream(s.device());
    current_streams[s.device_index()] = s.id();
    return old;
  }
  void* getStreamNativeHandle(const c10::Stream s) const override { return &stream_of(s); }
  DeviceIndex deviceCount() const noexcept override { return device_count(); }
  void record(void** event, const c10::Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event();
    record_event(event_of(*event), stream_of(s));
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event) wait_event(event_of(event), stream_of(s));
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    auto& e = event_of(event);
    std::lock_guard<std::mutex> hold(e.lock);
    TORCH_CHECK(!e.capture, "CUDA error: operation not permitted on an event last recorded in a capturing stream");
    return !e.stream || e.stream->done(e.number);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  bool queryStream(const c10::Stream& s) const override {
    forbid_in_capture("stream query");
    auto& stream = stream_of(s);
    return stream.done(stream.last());
  }
  void synchronizeStream(const c10::Stream& s) const override {
    host_sync("stream.synchronize", true);
    wait_for(stream_of(s));
  }
  bool isStreamCapturing(const c10::Stream& s) const override { return is_capturing(stream_of(s)); }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    auto& e = event_of(event);
    Stream* stream;
    uint64_t number;
    {
      std::lock_guard<std::mutex> hold(e.lock);
      stream = e.stream;
      number = e.number;
    }
    if (!stream) return;
    forbid_in_capture("event.synchronize");
    if (!stream->done(number)) host_sync("event.synchronize", true);  // one that has passed makes nobody wait
    stream->wait(number);
    raise_device_error();
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    host_sync("synchronize", true);
    drain_device(device);
    raise_device_error();
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    TORCH_CHECK(first && second, "Both events must be recorded before calculating elapsed time.");
    const double from = *event_of(first).milliseconds, until = *event_of(second).milliseconds;
    TORCH_CHECK(from >= 0 && until >= 0, "CUDA error: device not ready");
    return until - from;
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return device_count() > 0; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return used; }
  DeviceIndex deviceCount() const override { return device_count(); }
  int getNumGPUs() const override { return device_count(); }
  DeviceIndex current_device() const override { return ::current_device; }
  DeviceIndex getCurrentDevice() const override { return ::current_device; }
  void setCurrentDevice(DeviceIndex device) const override { ::current_device = device; }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
};
using ::at::CUDAHooksRegistry;
using ::at::RegistererCUDAHooksRegistry;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", Hooks);

// -- tensors ---------------------------------------------------------------------------------------------------------------

// Whether the devices have float64, which Apple's lack.
bool has_double() {
  static const bool has = env("EMULATED_GPU_DOUBLE", "1") != "0";
  return has;
}

Tensor new_tensor(c10::IntArrayRef sizes, c10::IntArrayRef strides, caffe2::TypeMeta type, std::optional<Device> device) {
  TORCH_CHECK_TYPE(has_double() || type != caffe2::TypeMeta::Make<double>(), "Cannot convert a tensor to float64: the device does not support it.");
  const DeviceIndex before = current_device;
  if (device && device->has_index()) current_device = device->index();
  const DeviceIndex here = current_device;
  if (here < 0 || here >= device_count()) {
    current_device = before;
    TORCH_CHECK(false, "CUDA error: invalid device ordinal");
  }
  const size_t bytes = at::detail::computeStorageNbytes(sizes, strides, type.itemsize());
  c10::intrusive_ptr<c10::StorageImpl> storage;
  try {
    storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, &device_allocator, true);
  } catch (...) {
    current_device = before;
    throw;
  }
  current_device = before;
  if (!bytes) storage->set_data_ptr_noswap(c10::DataPtr(nullptr, Device(CUDA, here)));
  {
    std::lock_guard<std::mutex> hold(capture_lock);
    if (capturing) capturing->own.insert(storage.get());
  }
  Tensor out = at::detail::make_tensor<c10::TensorImpl>(Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), type);
  out.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return out;
}

// A CPU tensor's memory as a CUDA tensor, for results whose shape only the kernel could know.
Tensor adopt(const Tensor& t, Device device) {
  Tensor out = new_tensor(t.sizes(), t.strides(), t.dtype(), device);
  if (t.numel()) Operand(out).on_host(out.storage()).copy_(t);
  return out;
}

std::string layout_of(const Tensor& t) {
  if (!t.defined()) return "undefined";
  return c10::str(t.dtype(), t.sizes(), t.strides(), t.is_cuda() ? "d" : "h", t.unsafeGetTensorImpl()->is_wrapped_number() ? "w" : "");
}

// What an operator returns for operands of a given layout: found by running the CPU kernel once on zeros.
struct Layout {
  bool defined = false;
  c10::SmallVector<int64_t, 6> sizes, strides;
  caffe2::TypeMeta dtype;
};
struct Results {
  std::vector<std::vector<Layout>> returned;  // by return, one each or those of a list
  std::vector<Layout> written;                // layouts of operands afterwards, where `out` was resized
};

Layout describe(const Tensor& t) {
  Layout layout;
  layout.defined = t.defined();
  if (t.defined()) {
    layout.sizes.assign(t.sizes().begin(), t.sizes().end());
    layout.strides.assign(t.strides().begin(), t.strides().end());
    layout.dtype = t.dtype();
  }
  return layout;
}

// Argument of a queued operator: a value, or the numbers of its tensors among the kernel's operands.
struct Argument {
  enum Kind { Value, One, List, Optionals } kind = Value;
  IValue value;
  std::vector<int> operands;     // -1 for None or undefined, -2 for a host tensor
  std::vector<Tensor> on_host;   // host tensors, copied at the launch
};

std::vector<IValue> with_tensors(const std::vector<Argument>& arguments, const std::vector<Tensor>& tensors) {
  std::vector<IValue> stack;
  for (const auto& argument : arguments) {
    size_t next = 0;
    auto pick = [&](int index) { return index >= 0 ? tensors[index] : index == -2 ? argument.on_host[next++] : Tensor(); };
    if (argument.kind == Argument::Value) {
      stack.push_back(argument.value);
    } else if (argument.kind == Argument::One) {
      stack.emplace_back(pick(argument.operands[0]));
    } else if (argument.kind == Argument::List) {
      std::vector<Tensor> list;
      for (int index : argument.operands) list.push_back(pick(index));
      stack.emplace_back(list);
    } else {
      c10::List<std::optional<Tensor>> list;
      for (int index : argument.operands) {
        Tensor t = pick(index);
        list.push_back(t.defined() ? std::optional<Tensor>(t) : std::nullopt);
      }
      stack.emplace_back(list);
    }
  }
  return stack;
}

Tensor filled_like(const Tensor& t, int value) {
  const size_t bytes = t.storage().nbytes();
  Tensor memory = at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte));
  memory.zero_();
  Operand operand(t);
  auto impl = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, c10::GetCPUAllocator()->allocate(bytes), c10::GetCPUAllocator(), true);
  if (bytes) memset(impl->mutable_data(), 0, bytes);
  Tensor out = at::detail::make_tensor<c10::TensorImpl>(Storage(impl), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(operand.sizes, operand.strides, operand.offset);
  if (operand.wrapped_number) out.unsafeGetTensorImpl()->set_wrapped_number(true);
  if (value) out.fill_(value);
  return out;
}

Results infer(const c10::OperatorHandle& op, const std::vector<Argument>& arguments, const std::vector<Tensor>& operands) {
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
  std::vector<Tensor> twins;
  std::vector<IValue> stack;
  for (int value : {0, 1}) {  // some kernels refuse zeros
    twins.clear();
    for (auto& t : operands) twins.push_back(filled_like(t, value));
    stack = with_tensors(arguments, twins);
    try {
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
      break;
    } catch (...) {
      if (value) throw;
    }
  }
  Results results;
  for (auto& value : stack) {
    std::vector<Layout> layouts;
    if (value.isTensor()) layouts.push_back(describe(value.toTensor()));
    if (value.isTensorList())
      for (const Tensor& t : value.toTensorVector()) layouts.push_back(describe(t));
    results.returned.push_back(layouts);
  }
  for (auto& twin : twins) results.written.push_back(describe(twin));
  return results;
}

const std::set<std::string> DATA_DEPENDENT = {"aten::nonzero", "aten::nonzero.out", "aten::masked_select", "aten::masked_select.out",
  "aten::_unique2", "aten::unique_consecutive", "aten::unique_dim", "aten::unique_dim_consecutive", "aten::_unique", "aten::repeat_interleave.Tensor",
  "aten::bincount", "aten::masked_scatter_", "aten::histc"};
const std::set<std::string> INDEXING = {"aten::index.Tensor", "aten::index.Tensor_out", "aten::index_put_", "aten::index_put",
  "aten::_index_put_impl_", "aten::_unsafe_index.Tensor", "aten::_unsafe_index_put"};

void resize_storage(const Tensor& t, const Layout& layout) {
  Tensor fresh = new_tensor(layout.sizes, layout.strides, layout.dtype, t.device());
  t.unsafeGetTensorImpl()->set_storage_keep_dtype(fresh.storage());
  t.unsafeGetTensorImpl()->set_sizes_and_strides(fresh.sizes(), fresh.strides(), 0);
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string name = toString(op.operator_name());
  const size_t count = schema.arguments().size(), begin = stack->size() - count;
  const bool indexing = INDEXING.count(name);

  // Take the arguments apart: tensors of the device become operands, those of the host are copied now.
  std::vector<Tensor> operands, written;
  std::vector<Argument> arguments(count);
  std::optional<Device> device;
  std::string elsewhere, why_sync;
  auto take = [&](Argument& argument, const Tensor& t, bool index) {
    if (!t.defined()) {
      argument.operands.push_back(-1);
    } else if (t.is_cuda()) {
      if (device && *device != t.device()) elsewhere = c10::str(t.device());
      if (!device) device = t.device();
      if (index && (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte)) why_sync = name + " with a mask";
      argument.operands.push_back(static_cast<int>(operands.size()));
      operands.push_back(t);
    } else {
      if (index) why_sync = name + " with indices on the host";
      else if (t.dim() > 0) elsewhere = c10::str("cpu", t.sizes());
      argument.operands.push_back(-2);
      argument.on_host.push_back(t.clone());
    }
  };
  std::vector<bool> writes(count);
  for (size_t i = 0; i < count; i++) {
    IValue& value = (*stack)[begin + i];
    const auto* alias = schema.arguments()[i].alias_info();
    writes[i] = alias && alias->isWrite();
    auto& argument = arguments[i];
    if (value.isTensor()) {
      argument.kind = Argument::One;
      take(argument, value.toTensor(), false);
      if (writes[i]) written.push_back(value.toTensor());
    } else if (value.isTensorList()) {
      argument.kind = Argument::List;
      for (const Tensor& t : value.toTensorVector()) {
        take(argument, t, false);
        if (writes[i]) written.push_back(t);
      }
    } else if (value.isOptionalTensorList()) {
      argument.kind = Argument::Optionals;
      for (const auto& t : value.toOptionalTensorVector()) take(argument, t.has_value() ? *t : Tensor(), indexing);
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      if (!device) device = value.toDevice();
      argument.value = IValue(Device(CPU));
    } else {
      argument.value = value;
    }
  }
  if (!device) device = Device(CUDA, current_device);
  if (!device->has_index()) device = Device(CUDA, current_device);
  TORCH_CHECK(elsewhere.empty() || operands.empty(), "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ",
              elsewhere, "! (", name, ")");
  Stream& stream = current_stream(device->index());

  // Results that the host needs now: run to the end of the stream, then the kernel.
  for (const auto& returned : schema.returns()) {
    const auto kind = returned.type()->kind();
    if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) why_sync = name;
  }
  if (DATA_DEPENDENT.count(name)) why_sync = name;
  auto given_back = [&](size_t i) -> std::optional<IValue> {  // the argument that a return stands for
    const auto* alias = schema.returns()[i].alias_info();
    if (!alias) return std::nullopt;
    for (size_t j = 0; j < count; j++) {
      const auto* other = schema.arguments()[j].alias_info();
      if (other && other->beforeSets() == alias->beforeSets()) return (*stack)[begin + j];
    }
    return std::nullopt;
  };
  std::vector<IValue> results;
  if (!why_sync.empty()) {
    host_sync(why_sync);
    count_launch(name);
    wait_for(stream);
    std::vector<Tensor> hosts;
    for (auto& t : operands) hosts.push_back(Operand(t).on_host(t.storage()));
    auto inner = with_tensors(arguments, hosts);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &inner);
    for (size_t i = 0; i < schema.returns().size(); i++) {
      if (auto same = given_back(i)) results.push_back(*same);
      else if (inner[i].isTensor()) results.emplace_back(inner[i].toTensor().defined() ? adopt(inner[i].toTensor(), *device) : Tensor());
      else if (inner[i].isTensorList()) {
        std::vector<Tensor> list;
        for (const Tensor& t : inner[i].toTensorVector()) list.push_back(adopt(t, *device));
        results.emplace_back(list);
      } else results.push_back(inner[i]);
    }
  } else {
    bool fresh = false;
    for (size_t i = 0; i < schema.returns().size(); i++) fresh |= !given_back(i).has_value();
    for (auto& t : written) fresh |= t.numel() == 0;  // an `out` that will be resized
    Results expected;
    if (fresh) {
      static std::mutex lock;
      static std::map<std::string, Results>& known = *new std::map<std::string, Results>();
      std::ostringstream key;
      key << name;
      for (const auto& argument : arguments) {
        if (argument.kind == Argument::Value) key << '|' << argument.value;
        for (const auto& t : argument.on_host) key << '|' << layout_of(t);
        for (int index : argument.operands) key << ',' << index;
      }
      for (const auto& t : operands) key << ';' << layout_of(t) << t.storage_offset();
      std::unique_lock<std::mutex> hold(lock);
      auto found = known.find(key.str());
      if (found == known.end()) {
        hold.unlock();
        Results made = infer(op, arguments, operands);
        hold.lock();
        found = known.emplace(key.str(), made).first;
      }
      expected = found->second;
      hold.unlock();
      for (size_t i = 0; i < operands.size(); i++)
        if (operands[i].sizes() != c10::IntArrayRef(expected.written[i].sizes)) resize_storage(operands[i], expected.written[i]);
    }
    auto kernel = std::make_shared<Kernel>();
    kernel->name = name;
    for (auto& t : operands) kernel->operands.emplace_back(t);
    const size_t inputs = operands.size();
    std::vector<std::vector<int>> targets(schema.returns().size());  // operands that a return is written to
    for (size_t i = 0; i < schema.returns().size(); i++) {
      if (auto same = given_back(i)) {
        results.push_back(*same);
        continue;
      }
      std::vector<Tensor> made;
      for (const auto& layout : expected.returned[i]) {
        made.push_back(layout.defined ? new_tensor(layout.sizes, layout.strides, layout.dtype, *device) : Tensor());
        targets[i].push_back(layout.defined ? static_cast<int>(kernel->operands.size()) : -1);
        if (layout.defined) kernel->operands.emplace_back(made.back());
      }
      if (schema.returns()[i].type()->kind() == c10::TypeKind::ListType) results.emplace_back(made);
      else results.emplace_back(made[0]);
    }
    kernel->body = [op, arguments, targets, inputs, name](std::vector<Tensor>& tensors) {
      auto inner = with_tensors(arguments, std::vector<Tensor>(tensors.begin(), tensors.begin() + inputs));
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &inner);
      for (size_t i = 0; i < targets.size(); i++) {
        std::vector<Tensor> made;
        if (targets[i].empty()) continue;
        if (inner[i].isTensor()) made = {inner[i].toTensor()};
        else made = inner[i].toTensorVector();
        for (size_t j = 0; j < made.size(); j++) {
          if (targets[i][j] < 0) continue;
          Tensor& target = tensors[targets[i][j]];
          TORCH_CHECK(target.sizes() == made[j].sizes(), "emulated device: ", name, " returned ", made[j].sizes(), ", expected ", target.sizes());
          if (target.numel()) target.copy_(made[j]);
        }
      }
    };
    launch(stream, std::move(kernel));
  }
  torch::jit::drop(*stack, count);
  for (auto& value : results) stack->push_back(std::move(value));
}

// -- operators that are no kernel ----------------------------------------------------------------------------------------------

caffe2::TypeMeta type_or_default(std::optional<at::ScalarType> dtype) {
  return c10::scalarTypeToTypeMeta(dtype.value_or(c10::typeMetaToScalarType(at::get_default_dtype())));
}
Tensor empty_memory_format(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device,
                           std::optional<bool>, std::optional<at::MemoryFormat> format) {
  auto type = type_or_default(dtype);
  auto meta = at::empty(C10_AS_INTARRAYREF_SLOW(size), at::TensorOptions().dtype(type).device(at::kMeta), format);
  return new_tensor(meta.sizes(), meta.strides(), type, device);
}
Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  return new_tensor(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), type_or_default(dtype), device);
}

std::shared_ptr<Kernel> copy_kernel(const char* name, const Tensor& to, const Tensor& from) {
  auto kernel = std::make_shared<Kernel>();
  kernel->name = name;
  kernel->operands = {Operand(to), Operand(from)};
  kernel->body = [](std::vector<Tensor>& tensors) { tensors[0].copy_(tensors[1]); };
  return kernel;
}

Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  if (to.numel() == 0 || to.is_same(from)) return to;
  if (to.is_cuda() && from.is_cuda()) {
    Stream& stream = current_stream(from.device().index());
    if (to.device() == from.device()) {
      launch(stream, copy_kernel("aten::copy_", to, from));
      return to;
    }
    Stream& other = current_stream(to.device().index());  // a copy between devices is ordered on both
    Event ready, done;
    record_event(ready, other);
    wait_event(ready, stream);
    launch(stream, copy_kernel("aten::copy_ peer", to, from));
    record_event(done, stream);
    wait_event(done, other);
    return to;
  }
  const bool upload = to.is_cuda();
  const Tensor& on_host = upload ? from : to;
  Stream& stream = current_stream(upload ? to.device().index() : from.device().index());
  const char* name = upload ? "copy host to device" : "copy device to host";
  if (on_host.device().type() != CPU) TORCH_CHECK(false, "emulated device: copies to ", on_host.device(), " are not supported");
  const bool pinned = is_pinned(on_host.storage().data());
  if (!non_blocking || !pinned) {
    // torch synchronizes unless told otherwise; told otherwise, the driver still may for pageable memory.
    host_sync(c10::str(name, non_blocking ? ", pageable memory" : ", blocking"));
    Tensor source = upload ? from.clone() : from;
    launch(stream, copy_kernel(name, to, source));
    if (!non_blocking || !upload) wait_for(stream);
    return to;
  }
  if (!upload) {
    launch(stream, copy_kernel(name, to, from));
    // Reading the result before synchronizing is an error that poison makes visible.
    if (!is_capturing(stream) && to.is_contiguous()) memset(to.data_ptr(), 0x7f, to.nbytes());
    return to;
  }
  auto kernel = copy_kernel(name, to, from);
  if (!is_capturing(stream)) {  // a replayed copy is meant to read what the host wrote last
    auto before = std::make_shared<Tensor>(from.clone(at::MemoryFormat::Contiguous));
    kernel->body = [before, line = calling_line()](std::vector<Tensor>& tensors) {
      Tensor now = tensors[1].contiguous();
      if (memcmp(now.data_ptr(), before->data_ptr(), now.nbytes())) {
        std::lock_guard<std::mutex> hold(counting);
        races.push_back(line);
        TORCH_CHECK(false, "pinned memory was overwritten while a copy to the device was in flight (copy at ", line.empty() ? "an unknown line" : line, ")");
      }
      tensors[0].copy_(tensors[1]);
    };
  }
  launch(stream, std::move(kernel));
  return to;
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* impl = self.unsafeGetTensorImpl();
  Tensor fresh = at::empty(sizes, self.options().device(at::kMeta));
  const size_t bytes = fresh.numel() * self.itemsize() + self.storage_offset() * self.itemsize();
  if (self.storage().nbytes() < bytes) {
    Tensor grown = new_tensor({static_cast<int64_t>(bytes)}, {1}, caffe2::TypeMeta::Make<uint8_t>(), self.device());
    const int64_t kept = self.storage().nbytes();
    if (kept) {
      Tensor old = at::detail::make_tensor<c10::TensorImpl>(Storage(self.storage()), c10::DispatchKeySet(c10::DispatchKey::CUDA), caffe2::TypeMeta::Make<uint8_t>());
      old.unsafeGetTensorImpl()->set_sizes_and_strides(c10::IntArrayRef(&kept, 1), c10::IntArrayRef({1}), 0);
      launch(current_stream(self.device().index()), copy_kernel("resize", grown.narrow(0, 0, kept), old));
    }
    impl->set_storage_keep_dtype(grown.storage());
  }
  impl->set_sizes_and_strides(fresh.sizes(), fresh.strides(), self.storage_offset());
  return self;
}
Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  std::optional<int64_t> at = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::cpu::as_strided(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), at);
}
Tensor view(const Tensor& self, c10::SymIntArrayRef size) { return at::cpu::view(self, C10_AS_INTARRAYREF_SLOW(size)); }
Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::cpu::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
Tensor unfold(const Tensor& self, int64_t dim, int64_t size, int64_t step) { return at::cpu::unfold(self, dim, size, step); }
at::Scalar local_scalar_dense(const Tensor& self) {
  host_sync("item");
  count_launch("aten::_local_scalar_dense");
  wait_for(current_stream(self.device().index()));
  return at::_local_scalar_dense(Operand(self).on_host(self.storage()));
}
Tensor& set_source_storage(Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}
void record_stream(Tensor&, at::Stream) {}  // queued kernels keep their memory alive

// Kernels that exist on CUDA only, as one launch each.
std::vector<Tensor> fused(const char* name, const std::vector<Tensor>& inputs, const std::vector<c10::IntArrayRef>& sizes,
                          std::function<std::vector<Tensor>(std::vector<Tensor>&)> body) {
  auto kernel = std::make_shared<Kernel>();
  kernel->name = name;
  std::vector<int> places;
  for (const auto& t : inputs) {
    places.push_back(t.defined() ? static_cast<int>(kernel->operands.size()) : -1);
    if (t.defined()) kernel->operands.emplace_back(t);
  }
  const size_t given = kernel->operands.size();
  std::vector<Tensor> outputs;
  for (auto size : sizes) {
    outputs.push_back(at::empty(size, inputs[0].options()));
    kernel->operands.emplace_back(outputs.back());
  }
  kernel->body = [body, places, given](std::vector<Tensor>& tensors) {
    std::vector<Tensor> in;
    for (int place : places) in.push_back(place < 0 ? Tensor() : tensors[place]);
    auto made = body(in);
    for (size_t i = 0; i < made.size(); i++)
      if (tensors[given + i].numel()) tensors[given + i].copy_(made[i]);
  };
  launch(current_stream(inputs[0].device().index()), std::move(kernel));
  return outputs;
}
Tensor defined(const std::optional<Tensor>& t) { return t.has_value() ? *t : Tensor(); }

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx, const std::optional<Tensor>& input_bias,
                                             const std::optional<Tensor>& hidden_bias) {
  auto out = fused("aten::_thnn_fused_lstm_cell", {input_gates, hidden_gates, cx, defined(input_bias), defined(hidden_bias)},
                   {cx.sizes(), cx.sizes(), input_gates.sizes()}, [](std::vector<Tensor>& in) -> std::vector<Tensor> {
    Tensor gates = in[0] + in[1];
    if (in[3].defined()) gates = gates + in[3] + in[4];
    auto parts = gates.chunk(4, 1);
    Tensor i = parts[0].sigmoid(), f = parts[1].sigmoid(), g = parts[2].tanh(), o = parts[3].sigmoid();
    Tensor cy = f * in[2] + i * g;
    return {o * cy.tanh(), cy, at::cat({i, f, g, o}, 1)};
  });
  return {out[0], out[1], out[2]};
}
std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const std::optional<Tensor>& grad_hy, const std::optional<Tensor>& grad_cy, const Tensor& cx, const Tensor& cy,
                                                      const Tensor& workspace, bool has_bias) {
  const int64_t gates = workspace.size(1), bias = has_bias ? gates : 0;
  auto out = fused("aten::_thnn_fused_lstm_cell_backward", {cx, cy, workspace, defined(grad_hy), defined(grad_cy)},
                   {workspace.sizes(), cx.sizes(), c10::IntArrayRef(&bias, 1)}, [has_bias](std::vector<Tensor>& in) -> std::vector<Tensor> {
    auto parts = in[2].chunk(4, 1);
    Tensor i = parts[0], f = parts[1], g = parts[2], o = parts[3], squashed = in[1].tanh();
    Tensor gh = in[3].defined() ? in[3] : at::zeros_like(in[0]);
    Tensor gc = gh * o * (1 - squashed * squashed);
    if (in[4].defined()) gc = gc + in[4];
    Tensor all = at::cat({gc * g * i * (1 - i), gc * in[0] * f * (1 - f), gc * i * (1 - g * g), gh * squashed * o * (1 - o)}, 1);
    return {all, gc * f, has_bias ? all.sum(0) : at::empty({0}, all.options())};
  });
  return {out[0], out[1], out[2]};
}
std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx, const std::optional<Tensor>& input_bias,
                                    const std::optional<Tensor>& hidden_bias) {
  const std::array<int64_t, 2> workspace = {hx.size(0), hx.size(1) * 5};
  auto out = fused("aten::_thnn_fused_gru_cell", {input_gates, hidden_gates, hx, defined(input_bias), defined(hidden_bias)}, {hx.sizes(), workspace},
                   [](std::vector<Tensor>& in) -> std::vector<Tensor> {
    Tensor a = in[3].defined() ? in[0] + in[3] : in[0], b = in[4].defined() ? in[1] + in[4] : in[1];
    auto x = a.chunk(3, 1), h = b.chunk(3, 1);
    Tensor r = (x[0] + h[0]).sigmoid(), z = (x[1] + h[1]).sigmoid(), n = (x[2] + r * h[2]).tanh();
    return {(in[2] - n) * z + n, at::cat({r, z, n, in[2], h[2]}, 1)};
  });
  return {out[0], out[1]};
}
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad_hy, const Tensor& workspace, bool has_bias) {
  const int64_t units = workspace.size(1) / 5, bias = has_bias ? 3 * units : 0;
  const std::array<int64_t, 2> gates = {workspace.size(0), 3 * units}, hidden = {workspace.size(0), units};
  auto out = fused("aten::_thnn_fused_gru_cell_backward", {grad_hy, workspace}, {gates, gates, hidden, c10::IntArrayRef(&bias, 1), c10::IntArrayRef(&bias, 1)},
                   [has_bias](std::vector<Tensor>& in) -> std::vector<Tensor> {
    auto parts = in[1].chunk(5, 1);
    Tensor r = parts[0], z = parts[1], n = parts[2], hx = parts[3], h2 = parts[4], g = in[0];
    Tensor gz = g * (hx - n) * z * (1 - z), gn = g * (1 - z) * (1 - n * n), gr = gn * h2 * r * (1 - r);
    Tensor x = at::cat({gr, gz, gn}, 1), h = at::cat({gr, gz, gn * r}, 1);
    Tensor none = at::empty({0}, x.options());
    return {x, h, g * z, has_bias ? x.sum(0) : none, has_bias ? h.sum(0) : none};
  });
  return {out[0], out[1], out[2], out[3], out[4]};
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("resize_", &resize_);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &unfold);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("set_.source_Storage_storage_offset", &set_source_storage);
  m.impl("record_stream", &record_stream);
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
  // One kernel each on CUDA, as with cuDNN; without this, torch would take them apart.
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  for (const auto& known : c10::Dispatcher::singleton().getAllOpNames()) {
    if (known.name.rfind("aten::_foreach_", 0) != 0) continue;
    const std::string name = known.name.substr(6) + (known.overload_name.empty() ? "" : "." + known.overload_name);
    m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

// -- collectives ---------------------------------------------------------------------------------------------------------------

struct Record {  // of the flight recorder
  int64_t sequence;
  std::string name, sizes, state;
  double queued;
};

struct CollectiveState {
  std::mutex lock;
  bool done = false;
  Time queued = std::chrono::steady_clock::now();
  Record record;
};
std::mutex recorder_lock;
std::deque<std::shared_ptr<CollectiveState>> recorder;
int64_t recorded = 0;
std::atomic<bool> collectives_aborted{false};

[[noreturn]] void abort_process(int rank, const std::string& why) {
  std::cerr << "[rank" << rank << "]: [PG 0 Rank " << rank << "] " << why
            << "\nterminate called after throwing an instance of 'c10::DistBackendError'\n  what():  " << why << std::endl;
  abort();
}

struct Collective final : c10d::Work {
  std::shared_ptr<Event> end = std::make_shared<Event>();
  DeviceIndex device;
  explicit Collective(DeviceIndex device) : device(device) {}
  bool isCompleted() override {
    std::lock_guard<std::mutex> hold(end->lock);
    return end->stream->done(end->number);
  }
  bool isSuccess() const override { return true; }
  void synchronize() override { wait_event(*end, current_stream(device)); }
  // Orders the current stream after the collective; the host goes on immediately, as with NCCL.
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void blockCurrentStream() override { synchronize(); }
};

struct EmulatedNCCL final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;
  std::chrono::milliseconds timeout;
  std::atomic<bool> closed{false};

  EmulatedNCCL(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size, std::chrono::milliseconds timeout)
      : Backend(rank, size), gloo(std::move(gloo)), timeout(timeout) {}
  const std::string getBackendName() const override { return "nccl"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return recorded; }
  void eagerConnectSingleDevice(Device) override {}
  void setTimeout(std::chrono::milliseconds t) override { timeout = t; }

  static void check(const Tensor& t) {
    TORCH_CHECK(t.is_cuda(), "No backend type associated with device type cpu");
    TORCH_CHECK(t.is_contiguous(), "Tensors must be contiguous");
    const std::set<at::ScalarType> known = {at::kChar, at::kByte, at::kFloat, at::kDouble, at::kInt, at::kLong, at::kHalf, at::kBool, at::kBFloat16};
    TORCH_CHECK(known.count(t.scalar_type()), "Input tensor data type is not supported for NCCL process group: ", t.scalar_type());
  }

  // The watchdog of NCCL's process group: a collective that takes too long ends the process.
  void watch(std::shared_ptr<CollectiveState> state) {
    std::thread([state, timeout = timeout, rank = getRank(), this_closed = &closed] {
      const Time end = state->queued + timeout;
      while (true) {
        {
          std::lock_guard<std::mutex> hold(state->lock);
          if (state->done) return;
        }
        if (collectives_aborted) return;
        if (std::chrono::steady_clock::now() > end)
          abort_process(rank, c10::str("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=", state->record.sequence, ", OpType=", state->record.name,
                                       ", Timeout(ms)=", timeout.count(), ")"));
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
      }
    }).detach();
  }

  using Operation = std::function<c10::intrusive_ptr<c10d::Work>(std::vector<Tensor>&)>;
  c10::intrusive_ptr<c10d::Work> start(const std::string& name, const std::vector<Tensor>& tensors, int64_t code, int64_t bytes, bool async, Operation operation) {
    for (const auto& t : tensors) check(t);
    const DeviceIndex device = tensors[0].device().index();
    Stream& caller = current_stream(device);
    Stream& stream = async ? stream_of(device, COMMUNICATION) : caller;
    auto work = c10::make_intrusive<Collective>(device);
    auto state = std::make_shared<CollectiveState>();
    {
      std::lock_guard<std::mutex> hold(recorder_lock);
      state->record = {++recorded, name, c10::str(tensors[0].sizes()), "scheduled",
                       std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count()};
      recorder.push_back(state);
      if (recorder.size() > 200) recorder.pop_front();
    }
    if (async) {
      Event ready;
      record_event(ready, caller);
      wait_event(ready, stream);
    }
    const bool captured = is_capturing(stream);
    auto kernel = std::make_shared<Kernel>();
    kernel->name = "nccl::" + name;
    for (const auto& t : tensors) kernel->operands.emplace_back(t);
    kernel->body = [this, code, bytes, operation, state, captured](std::vector<Tensor>& hosts) {
      {
        std::lock_guard<std::mutex> hold(state->lock);
        state->record.state = "started";
      }
      try {
        // NCCL does not compare what ranks ask for: ranks that differ wait for each other forever.
        auto mine = at::tensor({code, bytes}, at::kLong);
        std::vector<Tensor> all;
        for (int i = 0; i < getSize(); i++) all.push_back(at::zeros({2}, at::kLong));
        std::vector<std::vector<Tensor>> outputs = {all};
        std::vector<Tensor> inputs = {mine};
        gloo->allgather(outputs, inputs)->wait();
        for (const auto& other : all)
          if (!at::equal(other, mine)) hang();
        operation(hosts)->wait();
      } catch (const std::exception& error) {
        if (closed || collectives_aborted) return;
        if (env("EMULATED_NCCL_PEER_FAILURE", "hang") == "abort") abort_process(getRank(), c10::str("NCCL error: remote process exited or there was a network error: ", error.what()));
        hang();  // over NVLink or shared memory, NCCL does not notice that a peer is gone
      }
      std::lock_guard<std::mutex> hold(state->lock);
      state->done = true;
      state->record.state = "completed";
    };
    launch(stream, std::move(kernel));
    if (!captured) watch(state);  // torch does not watch captured collectives
    record_event(*work->end, stream);
    return work;
  }
  static void hang() {
    while (!collectives_aborted) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    return start("ALLREDUCE", tensors, 1, tensors[0].nbytes(), options.asyncOp, [this, options](std::vector<Tensor>& hosts) { return gloo->allreduce(hosts, options); });
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    return start("BROADCAST", tensors, 2, tensors[0].nbytes(), options.asyncOp, [this, options](std::vector<Tensor>& hosts) { return gloo->broadcast(hosts, options); });
  }
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<Tensor>>& outputs, std::vector<Tensor>& inputs, const c10d::AllgatherOptions& options) override {
    std::vector<Tensor> all = outputs[0];
    all.push_back(inputs[0]);
    return start("ALLGATHER", all, 3, inputs[0].nbytes(), options.asyncOp, [this, options](std::vector<Tensor>& hosts) {
      std::vector<Tensor> in = {hosts.back()};
      std::vector<std::vector<Tensor>> out = {std::vector<Tensor>(hosts.begin(), hosts.end() - 1)};
      return gloo->allgather(out, in, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    std::vector<Tensor> all = {output, input};
    return start("_ALLGATHER_BASE", all, 4, input.nbytes(), options.asyncOp, [this, options](std::vector<Tensor>& hosts) {
      return gloo->_allgather_base(hosts[0], hosts[1], options);
    });
  }
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<Tensor>& tensors, const c10d::ReduceOptions& options) override {
    return start("REDUCE", tensors, 5, tensors[0].nbytes(), options.asyncOp, [this, options](std::vector<Tensor>& hosts) { return gloo->reduce(hosts, options); });
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override {
    std::vector<Tensor> one = {at::zeros({1}, at::TensorOptions().device(Device(CUDA, current_device)).dtype(at::kFloat))};
    auto work = allreduce(one, c10d::AllreduceOptions());
    host_sync("barrier", true);
    work->wait();
    wait_for(current_stream(current_device));
    return work;
  }
  void shutdown() override {
    // Waits for collectives in flight, so it may block after a failure, as NCCL's may.
    for (DeviceIndex device = 0; device < device_count(); device++) {
      auto& stream = stream_of(device, COMMUNICATION);
      stream.wait(stream.last());
    }
    closed = true;
  }
  void abort() override {
    closed = true;
    collectives_aborted = true;
  }
};

pybind11::list flight_record() {
  std::vector<Record> records;
  {
    std::lock_guard<std::mutex> hold(recorder_lock);
    for (auto& state : recorder) {
      std::lock_guard<std::mutex> hold_state(state->lock);
      records.push_back(state->record);
    }
  }
  pybind11::list out;
  for (const auto& r : records) {
    pybind11::dict entry;
    entry["collective_seq_id"] = r.sequence;
    entry["profiling_name"] = "nccl:" + r.name;
    entry["input_sizes"] = r.sizes;
    entry["state"] = r.state;
    entry["time_created_ns"] = static_cast<int64_t>(r.queued * 1e9);
    out.append(entry);
  }
  return out;
}
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  using nogil = py::call_guard<py::gil_scoped_release>;
  c10::SetAllocator(CUDA, &device_allocator, 100);
  pthread_atfork(nullptr, nullptr, [] { if (used) bad_fork = true; });

  m.def("stop_streams", &stop_streams, nogil());
  m.def("counts", [] {
    std::lock_guard<std::mutex> hold(counting);
    return std::make_tuple(launches, syncs);
  });
  m.def("launches_by_name", [] {
    std::lock_guard<std::mutex> hold(counting);
    return launches_by_name;
  });
  m.def("sync_log", [] {
    std::lock_guard<std::mutex> hold(counting);
    std::vector<std::pair<std::string, std::string>> log;
    for (const auto& s : sync_log) log.emplace_back(s.what, s.line);
    return log;
  });
  m.def("races", [] {
    std::lock_guard<std::mutex> hold(counting);
    return races;
  });
  m.def("clear", [] {
    std::lock_guard<std::mutex> hold(counting);
    launches = syncs = 0;
    launches_by_name.clear();
    sync_log.clear();
    races.clear();
  });
  m.def("set_launches", [](int64_t count) {
    std::lock_guard<std::mutex> hold(counting);
    launches = count;
  });
  m.def("clear_error", [] {
    std::lock_guard<std::mutex> hold(error_lock);
    device_error.clear();
  });
  m.def("log_syncs", [](bool on) { logging_syncs = on; });
  m.def("set_line_finder", [](py::object function) { find_line = function.release().ptr(); });

  m.def("device_count", [] { return static_cast<int>(device_count()); });
  m.def("physical_device", [](int device) { return visible_devices().at(device); });
  m.def("get_device", [] { return static_cast<int>(current_device); });
  m.def("set_device", [](int device) {
    if (device < 0) return;
    TORCH_CHECK(device < device_count(), "CUDA error: invalid device ordinal");
    current_device = device;
  });
  m.def("exchange_device", [](int device) {
    const int before = current_device;
    if (device < 0) return -1;
    TORCH_CHECK(device < device_count(), "CUDA error: invalid device ordinal");
    current_device = device;
    return before;
  });
  m.def("current_stream", [](int device) { return current_streams.at(device); });
  m.def("set_stream", [](int64_t id, int device) { current_streams.at(device) = id; });
  m.def("synchronize", [] { Guard().synchronizeDevice(current_device); }, nogil());
  m.def("sleep", [](int64_t nanoseconds) {
    auto kernel = std::make_shared<Kernel>();
    kernel->name = "sleep";
    kernel->body = [nanoseconds](std::vector<Tensor>&) { std::this_thread::sleep_for(std::chrono::nanoseconds(nanoseconds)); };
    launch(current_stream(current_device), kernel);
  });
  m.def("elapsed_time", [](int64_t first, int64_t second) { return Guard().elapsedTime(reinterpret_cast<void*>(first), reinterpret_cast<void*>(second), 0); });
  m.def("is_capturing", [] { return is_capturing(current_stream(current_device)); });
  m.def("in_bad_fork", [] { return bad_fork.load(); });
  m.def("create_context", [] { note_context(current_device); });
  m.def("set_sync_debug_mode", [](int mode) { sync_debug_mode = mode; });
  m.def("get_sync_debug_mode", [] { return sync_debug_mode.load(); });
  m.def("memory", [](int device) { return std::make_tuple(memory_use.at(device).current.load(), memory_use.at(device).peak.load(), total_memory()); });
  m.def("reset_peak_memory", [](int device) { memory_use.at(device).peak = memory_use.at(device).current.load(); });
  m.def("has_hooks", [] { return at::detail::getCUDAHooks().isBuilt(); });
  m.def("flight_record", &flight_record);
  // What NCCL's watchdog does when a collective failed: a native thread ends the process.
  m.def("abort_as_nccl", [](int rank) {
    std::thread([rank] { abort_process(rank, "NCCL error: remote process exited or there was a network error"); }).detach();
  });
  m.def("backend", [](c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size, int64_t timeout_ms) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<EmulatedNCCL>(std::move(gloo), rank, size, std::chrono::milliseconds(timeout_ms));
  });
  py::class_<Graph, std::shared_ptr<Graph>>(m, "Graph")
      .def(py::init([](bool) { return std::make_shared<Graph>(); }), py::arg("keep_graph") = false)
      .def("capture_begin", [](Graph& graph, py::object, const std::string&) { graph.begin(); }, py::arg("pool") = py::none(), py::arg("capture_error_mode") = "global")
      .def("capture_end", &Graph::end)
      .def("instantiate", [](Graph&) {})
      .def("replay", &Graph::replay, nogil())
      .def("reset", &Graph::reset)
      .def("pool", [](Graph&) { return std::make_tuple(0, 1); })
      .def("__len__", [](Graph& graph) { return graph.kernels.size(); });
}
