// A second device for tests: PyTorch's PrivateUse1 backend on the memory of the CPU.
//
// Kernels run on the CPU, on aliases of the device's storages, so results equal the CPU's bit for bit. Tensors of
// both devices in one operator raise as they do on CUDA. Waits of the host, copies, bytes and operators are counted.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_set>
#include <vector>

namespace {

using at::Tensor;
using Count = std::atomic<int64_t>;

constexpr auto KIND = c10::DeviceType::PrivateUse1;
const c10::Device DEVICE(KIND, 0);

Count waits{0}, to_host{0}, to_device{0}, to_host_bytes{0}, to_device_bytes{0}, pageable{0}, calls{0};
Count allocated{0}, peak{0}, capacity{int64_t{1} << 34};
std::atomic<bool> no_float64{false}, trace{false};
std::mutex table;  // of the two maps
std::map<std::string, int64_t> by_operator, wait_reasons;

bool on_device(const Tensor& t) { return t.defined() && t.device().type() == KIND; }

void wait(const std::string& reason) {
  ++waits;
  if (trace) { std::lock_guard<std::mutex> hold(table); ++wait_reasons[reason]; }
}

void check_type(at::ScalarType type) {
  TORCH_CHECK_TYPE(!no_float64 || (type != at::kDouble && type != at::kComplexDouble),
                   "Cannot convert a tensor of the second device to float64: the device has no float64");
}

// ---------------------------------------------------------------- memory

struct Block { void* memory; int64_t bytes; };

void* reserve(size_t bytes) {
  void* memory = nullptr;
  TORCH_CHECK(posix_memalign(&memory, 64, bytes) == 0, "out of memory");
  return memory;
}

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  allocated -= block->bytes;
  std::free(block->memory);
  delete block;
}

struct DeviceMemory final : c10::DeviceAllocator {
  at::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, [](void*) {}, DEVICE};
    const int64_t now = allocated.fetch_add(bytes) + int64_t(bytes);
    if (now > capacity) {
      allocated -= bytes;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "second device out of memory: tried to allocate ", bytes, " bytes");
    }
    if (now > peak) peak = now;
    auto* block = new Block{reserve(bytes), int64_t(bytes)};
    return {block->memory, block, &release, DEVICE};
  }
  at::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const at::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* kind : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) {
      (*kind)[0].current = allocated;
      (*kind)[0].peak = peak;
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { peak = allocated.load(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    return {size_t(capacity - allocated), size_t(capacity)};
  }
};
DeviceMemory memory;
REGISTER_ALLOCATOR(KIND, &memory);

// Memory of the host that the device reads without a wait.
std::mutex pinned_table;
std::unordered_set<const void*> pinned;

void unpin(void* address) {
  { std::lock_guard<std::mutex> hold(pinned_table); pinned.erase(address); }
  std::free(address);
}

struct PinnedMemory final : at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    void* address = reserve(bytes ? bytes : 1);
    { std::lock_guard<std::mutex> hold(pinned_table); pinned.insert(address); }
    return {address, address, &unpin, at::kCPU};
  }
  at::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
PinnedMemory pinned_memory;

bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> hold(pinned_table);
  return pinned.count(address) > 0;
}

// ---------------------------------------------------------------- the device: one, with one stream

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = KIND;  // read by the registration
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { wait("synchronize"); }
  void synchronizeDevice(c10::DeviceIndex) const override { wait("synchronize"); }
  void synchronizeEvent(void*) const override { wait("event"); }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Device getDeviceFromPtr(void*) const override { return DEVICE; }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  // the CPU's generator: the same seed draws the same numbers on both devices
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto fresh = memory.allocate(bytes);
    if (storage.nbytes() && bytes) std::memcpy(fresh.get(), storage.data(), std::min(bytes, storage.nbytes()));
    auto* impl = storage.unsafeGetStorageImpl();
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(bytes);
  }
};
Hooks hooks;

// ---------------------------------------------------------------- the same memory, as tensors of either device

template <class Owner>
at::DataPtr borrow(void* data, Owner owner, c10::Device device) {
  return {data, new Owner(std::move(owner)), [](void* context) { delete static_cast<Owner*>(context); }, device};
}

Tensor with_layout(Tensor made, const Tensor& like) {
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) made._set_conj(true);
  if (like.is_neg()) made._set_neg(true);
  return made;
}

Tensor with_storage(c10::Storage storage, const Tensor& like, c10::DispatchKey key) {
  return with_layout(at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype()), like);
}

// A view of ``base``, which is an inference tensor only if that is one.
Tensor view_of(const Tensor& base, const Tensor& like) {
  c10::Storage storage = base.storage();
  return with_layout(at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, std::move(storage), base.key_set(), like.dtype()), like);
}

// A CPU tensor on the memory of a device tensor.
Tensor as_cpu(const Tensor& t) {
  auto storage = t.storage();
  auto data = borrow(storage.mutable_data(), storage, at::kCPU);
  c10::Storage alias(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), at::getCPUAllocator(), true);
  return with_storage(std::move(alias), t, c10::DispatchKey::CPU);
}

// A device tensor on the memory that a CPU kernel allocated for its result.
c10::Storage device_storage(const c10::Storage& storage) {
  const int64_t bytes = storage.nbytes();
  struct Owner {
    c10::Storage storage;
    int64_t bytes;
    Owner(c10::Storage s, int64_t b) : storage(std::move(s)), bytes(b) {}
    Owner(Owner&& other) noexcept : storage(std::move(other.storage)), bytes(other.bytes) { other.bytes = 0; }
    ~Owner() { allocated -= bytes; }
  };
  const int64_t now = allocated.fetch_add(bytes) + bytes;
  if (now > capacity) {
    allocated -= bytes;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "second device out of memory: tried to allocate ", bytes, " bytes");
  }
  if (now > peak) peak = now;
  auto data = borrow(storage.mutable_data(), Owner(storage, bytes), DEVICE);
  return {c10::Storage::use_byte_size_t(), size_t(bytes), std::move(data), &memory, true};
}

Tensor as_device(const Tensor& t) {
  check_type(t.scalar_type());
  return with_storage(device_storage(t.storage()), t, c10::DispatchKey::PrivateUse1);
}

// ---------------------------------------------------------------- every operator without a kernel below

struct Alias { Tensor original, cpu; };

struct Arguments {
  std::vector<Alias> aliases;
  bool device = false;
  Tensor foreign;  // a CPU tensor that is no scalar

  Tensor take(const Tensor& t, bool index) {
    if (!t.defined()) return t;
    if (!on_device(t)) {
      if (t.is_cpu() && t.dim() > 0 && !index) foreign = t;  // indices may lie on the CPU
      return t;
    }
    device = true;
    for (auto& alias : aliases)
      if (alias.original.is_same(t)) return alias.cpu;
    for (auto& alias : aliases)
      if (alias.original.storage().is_alias_of(t.storage())) {
        aliases.push_back({t, with_storage(alias.cpu.storage(), t, c10::DispatchKey::CPU)});
        return aliases.back().cpu;
      }
    aliases.push_back({t, as_cpu(t)});
    return aliases.back().cpu;
  }

  // An argument that the kernel resized has other sizes, and maybe other memory.
  void write_back() {
    for (auto& [original, cpu] : aliases) {
      if (cpu.storage().data() != original.storage().data()) {
        check_type(original.scalar_type());
        auto fresh = device_storage(cpu.storage());
        auto* impl = original.storage().unsafeGetStorageImpl();
        impl->set_nbytes(fresh.nbytes());
        impl->set_data_ptr_noswap(std::move(fresh.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks()));
      }
      if (cpu.sizes() != original.sizes() || cpu.strides() != original.strides())
        original.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
    }
  }

  Tensor give(const Tensor& t) const {
    if (!t.defined()) return t;
    for (const auto& alias : aliases)
      if (alias.cpu.is_same(t)) return alias.original;
    for (const auto& alias : aliases)
      if (alias.cpu.storage().is_alias_of(t.storage()))
        return view_of(alias.original, t);
    return as_device(t);
  }
};

bool is_mask(const Tensor& t) { return t.defined() && (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte); }

const std::unordered_set<std::string> WAITS = {  // the size of the result, or the result, is read by the host
    "aten::nonzero", "aten::equal", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::_local_scalar_dense", "aten::bincount"};
const std::unordered_set<std::string> INDEXED = {  // others are made of these
    "aten::index", "aten::_index_put_impl_", "aten::_unsafe_index", "aten::_unsafe_index_put"};

void run_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  const auto first = stack->size() - count;
  const auto& name = schema.name();
  const bool indexed = INDEXED.count(name) > 0;
  Arguments arguments;
  bool mask = false, scalar = false;
  for (size_t i = first; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      scalar = value.toTensor().defined() && value.toTensor().is_cpu() && value.toTensor().numel() == 1;
      value = arguments.take(value.toTensor(), false);
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) list.push_back(arguments.take(t, false));
      value = std::move(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const auto& t : value.toOptionalTensorVector()) {
        list.push_back(t ? std::optional<Tensor>(arguments.take(*t, indexed)) : std::nullopt);
        mask = mask || (t && on_device(*t) && is_mask(*t));
      }
      value = std::move(list);
    } else if (value.isDevice()) {
      value = c10::Device(at::kCPU);
    }
  }
  TORCH_CHECK(!(arguments.device && arguments.foreign.defined()),
              "Expected all tensors to be on the same device, but found at least two devices, ", DEVICE,
              " and cpu! (in ", name, ", with a CPU tensor of shape ", arguments.foreign.sizes(), ")");
  // masks of `index` went through nonzero before; one number on the CPU fills by masks without a wait
  if (WAITS.count(name) || (mask && name == "aten::_index_put_impl_" && !scalar)) wait(name);
  const bool view = !schema.returns().empty() && schema.returns()[0].alias_info() &&
                    !schema.returns()[0].alias_info()->isWrite();
  if (!view) {
    ++calls;
    if (trace) { std::lock_guard<std::mutex> hold(table); ++by_operator[name]; }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  arguments.write_back();
  for (auto& value : *stack) {
    if (&value - stack->data() < std::ptrdiff_t(first)) continue;
    if (value.isTensor()) {
      value = arguments.give(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) list.push_back(arguments.give(t));
      value = std::move(list);
    }
  }
}

// ---------------------------------------------------------------- kernels: what makes and moves tensors

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const auto dtype = c10::dtype_or_default(type);
  check_type(dtype);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype, format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> type,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  const auto dtype = c10::dtype_or_default(type);
  check_type(dtype);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  const int64_t bytes = from.numel() * from.element_size();
  if (on_device(from) && !on_device(to)) {
    ++to_host;
    to_host_bytes += bytes;
    if (!(non_blocking && is_pinned(to.storage().data()))) wait("copy to host");
  } else if (!on_device(from)) {
    ++to_device;
    to_device_bytes += bytes;
    if (!(non_blocking && is_pinned(from.storage().data()))) ++pageable;
  } else {
    ++calls;
    if (trace) { std::lock_guard<std::mutex> hold(table); ++by_operator["aten::copy_"]; }
  }
  const auto target = on_device(to) ? as_cpu(to) : to;
  target.copy_(on_device(from) ? as_cpu(from) : from);
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  const size_t bytes = (impl->storage_offset() + impl->numel()) * impl->dtype().itemsize();
  if (impl->storage().nbytes() < bytes) hooks.resizePrivateUse1Bytes(impl->storage(), bytes);
  return self;
}

Tensor& set_storage_at(Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                       c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  const int64_t length = source.nbytes() / self.dtype().itemsize();
  return set_storage_at(self, std::move(source), 0, {c10::SymInt(length)}, {c10::SymInt(1)});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage_at(self, source.storage(), source.storage_offset(), c10::fromIntArrayRefSlow(source.sizes()),
                        c10::fromIntArrayRefSlow(source.strides()));
}

Tensor& set_empty(Tensor& self) {
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, memory.allocate(0), &memory, true);
  return set_storage_at(self, none, 0, {c10::SymInt(0)}, {c10::SymInt(1)});
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  // a call for a list of tensors is one call, as on CUDA; by default PyTorch makes one of each tensor
  for (const auto& op : c10::Dispatcher::singleton().getAllOpNames())
    if (op.name.rfind("aten::_foreach_", 0) == 0)
      m.impl(toString(op).substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage_at);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_empty);
}

// PyTorch's own lists: what autocast runs in 16 bits, in float32, and in the widest type of its arguments
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at::autocast;
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FLOAT32_RESULT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FLOAT32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FLOAT32_RESULT)
  AT_FORALL_PROMOTE(WIDEST)
}

// ---------------------------------------------------------------- what Python asks and sets

c10::Dict<std::string, int64_t> as_dict(const std::map<std::string, int64_t>& numbers) {
  c10::Dict<std::string, int64_t> dict;
  for (const auto& [name, number] : numbers) dict.insert(name, number);
  return dict;
}

TORCH_LIBRARY(second_device, m) {
  m.def("start", [] { at::RegisterPrivateUse1HooksInterface(&hooks); });
  m.def("counts", []() -> c10::Dict<std::string, int64_t> {
    return as_dict({{"waits", waits}, {"to_host", to_host}, {"to_device", to_device}, {"calls", calls},
                    {"to_host_bytes", to_host_bytes}, {"to_device_bytes", to_device_bytes}, {"pageable", pageable}});
  });
  m.def("operators", []() -> c10::Dict<std::string, int64_t> {
    std::lock_guard<std::mutex> hold(table);
    return as_dict(by_operator);
  });
  m.def("wait_reasons", []() -> c10::Dict<std::string, int64_t> {
    std::lock_guard<std::mutex> hold(table);
    return as_dict(wait_reasons);
  });
  m.def("reset", [](bool traced) {
    for (auto* number : {&waits, &to_host, &to_device, &to_host_bytes, &to_device_bytes, &pageable, &calls})
      *number = 0;
    std::lock_guard<std::mutex> hold(table);
    by_operator.clear();
    wait_reasons.clear();
    trace = traced;
  });
  m.def("refuse_float64", [](bool refused) { no_float64 = refused; });
  m.def("set_capacity", [](int64_t bytes) { capacity = bytes; });
}

}  // namespace
