// Loads an artifact without Python, runs it on the comparison's inputs, and compares the outputs.
//
//     load ARTIFACT CASES        CASES: the folder that write_cases.py made
//
// It reads float32, int32, int64, bool and uint8. It has no output allocator, so the outputs' shapes
// must not depend on data. Source: NVIDIA TensorRT's C++ API (enqueueV3), versions 8.6 to 11.
#include <NvInfer.h>
#if __has_include(<NvInferPlugin.h>)
#include <NvInferPlugin.h>
#endif
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <memory>

#include "artifact.hpp"

using namespace nvinfer1;
using artifact::json;
using artifact::require;

namespace {

struct Logger : ILogger {
    void log(Severity severity, const char* text) noexcept override {
        if (severity <= Severity::kERROR) std::cerr << text << "\n";
    }
};

void check(cudaError_t result) {
    require(result == cudaSuccess, std::string("CUDA reports: ") + cudaGetErrorString(result));
}

// "10.13.3" of TensorRT's number for it: before 10, that is major * 1000 + minor * 100 + patch
std::string version(int number) {
    const int unit = number < 10000 ? 1000 : 10000;
    return std::to_string(number / unit) + "." + std::to_string(number % unit / 100) + "." +
           std::to_string(number % 100);
}

// The same TensorRT and the same kind of GPU as at the build: a plan fits no other.
void check_machine(const json& target) {
    const std::string here = version(getInferLibVersion()), built = target.at("version");
    require((built + ".").rfind(here + ".", 0) == 0,
            "the engine was built with TensorRT " + built + ", but " + here + " is loaded");
    int major = 0, minor = 0;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0));
    const std::string gpu = std::to_string(major) + "." + std::to_string(minor);
    // none: a portable plan of TensorRT-RTX
    const auto wanted_all = target.at("compute_capabilities").get<std::vector<std::string>>();
    const json& wanted = target.at("compute_capabilities");
    const bool listed = std::find(wanted_all.begin(), wanted_all.end(), gpu) != wanted_all.end();
    require(wanted_all.empty() ? target.at("flavour") == "tensorrt_rtx" : listed,
            "the engine is for compute capability " + wanted.dump() + ", the GPU has " + gpu);
}

template <typename From>
std::vector<double> wide(const std::vector<char>& bytes) {
    const auto* first = reinterpret_cast<const From*>(bytes.data());
    return {first, first + bytes.size() / sizeof(From)};
}

std::vector<double> numbers(const std::vector<char>& bytes, const std::string& dtype) {
    if (dtype == "float32") return wide<float>(bytes);
    if (dtype == "float64") return wide<double>(bytes);
    if (dtype == "int32") return wide<std::int32_t>(bytes);
    if (dtype == "int64") return wide<std::int64_t>(bytes);
    require(dtype == "bool" || dtype == "uint8", dtype + " is not read by this program");
    return wide<std::uint8_t>(bytes);
}

template <typename To>
std::vector<char> narrow(const std::vector<double>& values) {
    const std::vector<To> all(values.begin(), values.end());
    const auto* first = reinterpret_cast<const char*>(all.data());
    return {first, first + all.size() * sizeof(To)};
}

// The engine's dtype may be narrower than the manifest's: TensorRT 8.6 reads int64 as int32.
std::string name_of(DataType type) {
    if (type == DataType::kFLOAT) return "float32";
    if (type == DataType::kINT32) return "int32";
    if (type == DataType::kBOOL) return "bool";
    if (type == DataType::kUINT8) return "uint8";
#if NV_TENSORRT_MAJOR >= 10 || defined(TRT_MAJOR_RTX)
    if (type == DataType::kINT64) return "int64";
#endif
    throw std::runtime_error("a tensor has a type that this program does not read");
}

std::vector<char> bytes_of(const std::vector<double>& values, const std::string& dtype) {
    if (dtype == "float32") return narrow<float>(values);
    if (dtype == "int32") return narrow<std::int32_t>(values);
    if (dtype == "int64") return narrow<std::int64_t>(values);
    return narrow<std::uint8_t>(values);
}

struct Buffer {  // on the GPU
    explicit Buffer(std::size_t size) { check(cudaMalloc(&pointer, size ? size : 1)); }
    ~Buffer() { cudaFree(pointer); }
    Buffer(const Buffer&) = delete;
    void* pointer = nullptr;
};

Dims dims_of(const json& shape) {
    Dims dims{};
    dims.nbDims = int(shape.size());
    for (int n = 0; n < dims.nbDims; ++n) dims.d[n] = shape[n];
    return dims;
}

// Runs one case, and returns whether every output is within its tolerance.
bool run(ICudaEngine& engine, const json& manifest, const json& one,
         const std::filesystem::path& folder, cudaStream_t stream) {
    const int profile = artifact::profile(manifest, one.at("sizes").get<artifact::Sizes>());
    const std::unique_ptr<IExecutionContext> context(engine.createExecutionContext());
    require(context && context->setOptimizationProfileAsync(profile, stream),
            "TensorRT makes no context");
    std::vector<std::unique_ptr<Buffer>> buffers;
    std::vector<std::vector<char>> hosts;  // inputs that the GPU or TensorRT still reads
    for (const json& input : one.at("inputs")) {
        const std::string name = input.at("name");
        const auto values = numbers(artifact::read(folder / input.at("file")), input.at("dtype"));
        hosts.push_back(bytes_of(values, name_of(engine.getTensorDataType(name.c_str()))));
        void* address = hosts.back().data();
        if (engine.getTensorLocation(name.c_str()) == TensorLocation::kDEVICE) {
            buffers.push_back(std::make_unique<Buffer>(hosts.back().size()));
            check(cudaMemcpyAsync(buffers.back()->pointer, address, hosts.back().size(),
                                  cudaMemcpyHostToDevice, stream));
            address = buffers.back()->pointer;
        }
        require(context->setInputShape(name.c_str(), dims_of(input.at("shape"))) &&
                    context->setTensorAddress(name.c_str(), address),
                "TensorRT refuses the input " + name);
    }
    std::vector<Buffer*> results;
    for (const json& output : one.at("outputs")) {
        const std::string name = output.at("name");
        const Dims shape = context->getTensorShape(name.c_str()), want = dims_of(output.at("shape"));
        std::size_t count = 1;
        for (int n = 0; n < want.nbDims; ++n) count *= std::size_t(want.d[n]);
        require(shape.nbDims == want.nbDims && std::equal(shape.d, shape.d + shape.nbDims, want.d),
                "output " + name + " has another shape than the stored one");
        buffers.push_back(std::make_unique<Buffer>(count * 8));
        results.push_back(buffers.back().get());
        require(context->setTensorAddress(name.c_str(), results.back()->pointer),
                "TensorRT refuses the output " + name);
    }
    require(context->enqueueV3(stream), "TensorRT fails to run the engine");
    bool good = true;
    std::size_t place = 0;
    for (const json& output : one.at("outputs")) {
        const std::string name = output.at("name");
        const auto want = numbers(artifact::read(folder / output.at("file")), output.at("dtype"));
        const std::string dtype = name_of(engine.getTensorDataType(name.c_str()));
        std::vector<char> raw(bytes_of(want, dtype).size());
        check(cudaMemcpyAsync(raw.data(), results[place++]->pointer, raw.size(),
                              cudaMemcpyDeviceToHost, stream));
        check(cudaStreamSynchronize(stream));
        const auto got = numbers(raw, dtype);
        const double rtol = output.at("rtol"), atol = output.at("atol");
        double worst = 0;
        bool within = true;
        for (std::size_t n = 0; n < want.size(); ++n) {
            const double error = std::abs(got[n] - want[n]);
            within = within && (error <= atol || error <= rtol * std::abs(want[n]));  // not for NaN
            worst = error > worst ? error : worst;
        }
        good = good && within;
        std::cout << one.at("sizes").dump() << " profile " << profile << " " << name << ": largest error "
                  << worst << (within ? "" : ", ABOVE ITS TOLERANCE") << "\n";
    }
    return good;
}

}  // namespace

int main(int count, char** words) try {
    require(count == 3, "usage: load ARTIFACT CASES");
    const std::filesystem::path folder = words[1], cases = words[2];
    const json manifest = artifact::manifest(folder);
    const std::vector<char> plan = artifact::plan(folder, manifest);
    check_machine(manifest.at("target"));
    Logger logger;
#if __has_include(<NvInferPlugin.h>)
    initLibNvInferPlugins(&logger, "");  // the parser may have used NVIDIA's own plugins
#endif
    const std::unique_ptr<IRuntime> runtime(createInferRuntime(logger));
    const std::unique_ptr<ICudaEngine> engine(
        runtime ? runtime->deserializeCudaEngine(plan.data(), plan.size()) : nullptr);
    require(engine != nullptr, "TensorRT does not load the plan");
    cudaStream_t stream = nullptr;
    check(cudaStreamCreate(&stream));
    bool good = true;
    for (const json& one : json::parse(artifact::read(cases / "cases.json")))
        good = run(*engine, manifest, one, cases, stream) && good;
    return good ? 0 : 1;
} catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << "\n";
    return 2;
}
