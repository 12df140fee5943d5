// What PyTorch's CPU build lacks before its autograd takes tensors that say they lie on a CUDA device and have no memory:
// a guard of devices and streams that does nothing, and the answer that CUDA is the accelerator. Loaded before PyTorch.
#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
constexpr c10::DeviceType CUDA = c10::DeviceType::CUDA;

c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, {CUDA, 0}); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return {CUDA, 0}; }
  c10::Device getDevice() const override { return {CUDA, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasPrimaryContext(c10::DeviceIndex) const override { return false; }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);
}  // namespace

namespace at::accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) { return CUDA; }
}  // namespace at::accelerator

namespace at::detail {
const CUDAHooksInterface& getCUDAHooks() {
  static Hooks hooks;
  return hooks;
}
}  // namespace at::detail
