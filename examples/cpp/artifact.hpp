// Reads an artifact's manifest.json, checks its plan, and chooses a profile. Needs no TensorRT.
#pragma once

#include <openssl/evp.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace artifact {

using nlohmann::json;
using Sizes = std::map<std::string, long long>;

inline void require(bool ok, const std::string& message) {
    if (!ok) throw std::runtime_error(message);
}

inline std::vector<char> read(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    require(file.good(), path.string() + ": can't be read");
    return {std::istreambuf_iterator<char>(file), {}};
}

inline std::string sha256(const std::vector<char>& bytes) {
    unsigned char digest[EVP_MAX_MD_SIZE];
    unsigned int size = 0;
    require(EVP_Digest(bytes.data(), bytes.size(), digest, &size, EVP_sha256(), nullptr) == 1,
            "OpenSSL can't compute a sha256");
    std::string text;
    for (unsigned int n = 0; n < size; ++n) {
        text += "0123456789abcdef"[digest[n] >> 4];
        text += "0123456789abcdef"[digest[n] & 15];
    }
    return text;
}

inline json manifest(const std::filesystem::path& folder) {
    const json found = json::parse(read(folder / "manifest.json"));
    require(found.at("schema") == 12, "manifest.json: this program reads schema 12, it has " +
                                         found.at("schema").dump());
    require(!found.at("build").is_null(), "the artifact has no engine: run `pipeline build`");
    require(found.at("build").at("plugins").empty(),
            "the engine needs plugins: load their libraries first, as this program does not");
    return found;
}

// The plan's bytes. A plan can run code, so it is read only if its hash is the manifest's. That
// finds damage. It is no proof of origin: whoever can change the plan can change the manifest.
inline std::vector<char> plan(const std::filesystem::path& folder, const json& manifest) {
    std::vector<char> bytes = read(folder / "engine.plan");
    const json& said = manifest.at("files").at("engine.plan");
    require(bytes.size() == said.at("bytes") && sha256(bytes) == said.at("sha256"),
            "engine.plan differs from its manifest: it was cut or changed");
    return bytes;
}

// The profile that fits best, by the rule of `pipeline.load`: of the profiles that allow the sizes,
// the one whose opt is nearest; then the narrowest; then the first.
inline int profile(const json& manifest, const Sizes& sizes) {
    const json& profiles = manifest.at("interface").at("profiles");
    const auto log_of = [](long long size) { return std::log(double(size > 1 ? size : 1)); };
    const auto rounded = [](double value) { return std::round(value * 1e9) / 1e9; };
    int best = -1;
    std::pair<double, double> least;
    for (int place = 0; place < int(profiles.size()); ++place) {
        double distance = 0, width = 0;
        bool allowed = true;
        for (const auto& [dim, range] : profiles[place].at("ranges").items()) {
            const long long low = range[0], opt = range[1], high = range[2], size = sizes.at(dim);
            allowed = allowed && low <= size && size <= high;
            distance += std::abs(log_of(size) - log_of(opt));
            width += log_of(high) - log_of(low);
        }
        const std::pair<double, double> rank{rounded(distance), rounded(width)};
        if (allowed && (best < 0 || rank < least)) best = place, least = rank;
    }
    require(best >= 0, "no profile allows these sizes");
    return best;
}

}  // namespace artifact
