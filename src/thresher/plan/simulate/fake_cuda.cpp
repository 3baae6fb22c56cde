// A CUDA device for builds of torch without CUDA, on which nothing is computed: a simulation has only tensors without
// values on it. Autograd asks for a device guard, streams and hooks of the device type of every tensor.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

const Device kDevice(DeviceType::CUDA, 0);
const Stream kStream(Stream::DEFAULT, kDevice);

// one device, one stream, and work that is always complete
class OneStreamGuard final : public c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
 public:
  Device getDevice() const override { return kDevice; }
  Device exchangeDevice(Device) const override { return kDevice; }
  Stream getStream(Device) const noexcept override { return kStream; }
  Stream getNewStream(Device, int) const override { return kStream; }
  Stream exchangeStream(Stream) const noexcept override { return kStream; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};

class OneDeviceHooks final : public at::CUDAHooksInterface {
 public:
  explicit OneDeviceHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
};

c10::impl::DeviceGuardImplRegistrar guard(DeviceType::CUDA, new OneStreamGuard());

}  // namespace

namespace at {
using at::CUDAHooksRegistry;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, OneDeviceHooks);
}  // namespace at
