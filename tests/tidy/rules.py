"""The rules of the source tree that a machine can check. Standard library only.

check_tree(root) returns every violation; tidy_test.py runs it and proves that each rule can fail.
"""
import dataclasses
import os
import re

SOURCE_FOLDERS = ("proto", "server", "engine", "controller", "deploy", "tests", "docker")
SKIPPED_FOLDERS = ("build", "__pycache__", "testdata", "node_modules")
CODE_SUFFIXES = (".h", ".cc", ".cu", ".in")
TEXT_SUFFIXES = CODE_SUFFIXES + (".py", ".sh", ".txt", ".cmake", ".proto", ".yml", ".yaml", ".conf", "Dockerfile")
MAX_LINES = 500

# Files over MAX_LINES and their size: they may shrink, and nothing is added here.
RATCHET = {}


@dataclasses.dataclass(frozen=True)
class Violation:
    path: str
    line: int
    rule: str
    text: str

    def __str__(self):
        return f"{self.path}:{self.line}: [{self.rule}] {self.text}"


# What a folder may include, besides itself and the standard library: folders or single headers of
# ours, and packages. The longest matching folder's row holds. tests/ may include everything.
ROWS = {
    "engine/base": ([], ["absl"]),
    "engine/device": (["engine/base"], ["absl"]),
    "engine/device/cuda": (["engine/base", "engine/device"], ["absl", "cuda"]),
    "engine/roofline": (["engine/base"], ["absl", "nlohmann_json"]),
    "engine/kernels": (["engine/base/check.h", "engine/base/tile_layout.h", "engine/base/bf16.h",
                        "engine/base/cpu_features.h"], ["openblas", "cuda"]),
    "engine/ops": (["engine/base", "engine/device", "engine/kernels"], ["absl"]),
    "engine/ops/cuda": (["engine/base", "engine/device", "engine/kernels", "engine/ops"],
                        ["absl", "cuda"]),
    "engine/kvcache": (["engine/base", "engine/device"], ["absl"]),
    "engine/attention": (["engine/base", "engine/device", "engine/kernels", "engine/ops",
                          "engine/kvcache"], ["absl", "tbb"]),
    "engine/model": (["engine/base", "engine/device", "engine/kernels", "engine/ops",
                      "engine/kvcache", "engine/attention"], ["absl", "nlohmann_json"]),
    "engine/tokenizer": (["engine/base"], ["absl", "nlohmann_json", "icu"]),
    "engine/runtime": (["engine"], ["absl"]),
    # The engine's interface speaks of share tables and machine profiles, which are roofline's.
    "server": (["engine/base", "engine/runtime", "engine/roofline", "proto"],
               ["absl", "protobuf", "grpc", "prometheus", "cli11"]),
    # A client: it knows the protocol, plans with the same formulas as worker and controller, and
    # writes the prompts of chats.
    "server/cli": (["engine/base", "engine/roofline", "engine/model/config.h",
                    "engine/tokenizer/chat_template.h", "server", "proto"],
                   ["absl", "protobuf", "grpc", "cli11"]),
    "controller": (["engine/base", "engine/roofline", "proto"],
                   ["absl", "protobuf", "grpc", "prometheus", "cli11", "nlohmann_json"]),
}

# An include that starts like this is of this package; the first match holds.
PACKAGES = (
    ("absl/", "absl"), ("tbb/", "tbb"), ("oneapi/", "tbb"), ("nlohmann/", "nlohmann_json"),
    ("unicode/", "icu"), ("pcre2", "pcre2"), ("cblas", "openblas"), ("openblas", "openblas"),
    ("grpc/health/v1/", "proto"), ("writescope/v1/", "proto"), ("google/rpc/", "proto"),
    ("grpcpp/", "grpc"), ("grpc/", "grpc"), ("google/protobuf/", "protobuf"),
    ("prometheus/", "prometheus"), ("CLI/", "cli11"), ("cuda", "cuda"), ("cublas", "cuda"),
    ("gtest/", "gtest"), ("gmock/", "gtest"), ("benchmark/", "benchmark"),
)
SYSTEM_FOLDERS = ("sys/", "linux/", "netinet/", "arpa/", "bits/")
# Kernels compute; who calls them spreads the work.
THREAD_HEADERS = {"thread", "mutex", "shared_mutex", "condition_variable", "future", "pthread.h",
                  "semaphore", "barrier", "latch"}
# A lock around a library that needs one, and the self-test of it.
THREADS_ALLOWED = ("engine/kernels/gemm.cc",)

# Libraries of CMake to the names above.
CMAKE_PACKAGES = (
    ("absl::", "absl"), ("TBB::", "tbb"), ("nlohmann_json::", "nlohmann_json"), ("ICU::", "icu"),
    ("PkgConfig::OPENBLAS", "openblas"), ("PkgConfig::PCRE2", "pcre2"), ("gRPC::", "grpc"),
    ("protobuf::", "protobuf"), ("prometheus-cpp::", "prometheus"), ("CLI11::", "cli11"),
    ("CUDA::", "cuda"), ("GTest::", "gtest"), ("benchmark::", "benchmark"),
)
ISA_FLAG = re.compile(r"-m(?:avx|amx|fma|f16c|bmi|sse|arch=|cpu=)[\w.=-]*")
ISA_SUFFIX = re.compile(r"_(?:avx2|avx512(?:bf16)?|amx)(?:_\w+)?\.(?:cc|h)$")


def _matches(path, prefixes):
    return any(path == p or path.startswith(p + "/") for p in prefixes)


def _row_of(folder):
    best = max((f for f in ROWS if folder == f or folder.startswith(f + "/")), key=len, default=None)
    return (best, *ROWS[best]) if best else None


def blank_comments_and_strings(text):
    """C++ text with comments and the insides of literals as spaces; lines stay where they are."""
    pattern = re.compile(
        r'//[^\n]*|/\*.*?\*/|R"(?P<d>[^\s()\\]{0,16})\(.*?\)(?P=d)"|"(?:\\.|[^"\\\n])*"'
        r"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])*'", re.S)
    return pattern.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)


def _line(text, position):
    return text.count("\n", 0, position) + 1


def _read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def source_files(root):
    """Paths from `root`, with forward slashes, of all text files that the rules are about."""
    found = [n for n in ("CMakeLists.txt", "docker-compose.yml") if os.path.isfile(os.path.join(root, n))]
    for top in SOURCE_FOLDERS:
        for folder, subfolders, files in os.walk(os.path.join(root, top)):
            subfolders[:] = sorted(s for s in subfolders if s not in SKIPPED_FOLDERS)
            for name in sorted(files):
                if name.endswith(TEXT_SUFFIXES):
                    path = os.path.relpath(os.path.join(folder, name), root)
                    found.append(path.replace(os.sep, "/"))
    return found


def check_includes(path, text):
    row = _row_of(os.path.dirname(path))
    if row is None:
        return
    folder, ours, packages = row
    for m in re.finditer(r'^[ \t]*#[ \t]*include[ \t]+([<"])([^>"]+)[>"]', text, re.M):
        name, line = m.group(2), _line(text, m.start())
        if name.startswith(("engine/", "server/", "controller/", "proto/", "tests/")):
            if not (_matches(name, ours) or _matches(os.path.dirname(name), [folder])):
                yield Violation(path, line, "include", f"{folder} may not include {name}")
            continue
        package = next((p for start, p in PACKAGES if name.startswith(start)), None)
        if package == "proto":
            if "proto" not in ours:
                yield Violation(path, line, "include", f"{folder} may not include {name}, of proto")
        elif package is not None:
            if package not in packages:
                yield Violation(path, line, "include",
                                f"{folder} may not include {name}, of {package}")
        elif m.group(1) == '"' or ("/" in name and not name.startswith(SYSTEM_FOLDERS)):
            yield Violation(path, line, "include", f"{name}: no path from the root, no known package")
        elif folder == "engine/kernels" and name in THREAD_HEADERS and path not in THREADS_ALLOWED:
            yield Violation(path, line, "include", f"{folder} makes no threads; <{name}>")


def check_code(path, text):
    bare = blank_comments_and_strings(text)
    if path.endswith(".h"):
        first = re.search(r"^[ \t]*(\S[^\n]*)", bare, re.M)
        if first is None or first.group(1).strip() != "#pragma once":
            yield Violation(path, 1, "pragma-once", "the first line of code is not '#pragma once'")
        for m in re.finditer(r"\busing\s+namespace\b", bare):
            yield Violation(path, _line(bare, m.start()), "using-namespace", "in a header")
    patterns = (
        ("regex", r"\bstd::(?:w?c?s?regex|basic_regex)|#\s*include\s*<regex>",
         "std::regex recurses over its input and overflows the stack"),
        ("using-namespace", r"\busing\s+namespace\s+std\s*;", "using namespace std"),
        ("isa", r"__attribute__\s*\(\(\s*target\b|#\s*pragma\s+GCC\s+target",
         "instruction sets are chosen by file, in CMake"),
    )
    for rule, pattern, why in patterns:
        for m in re.finditer(pattern, bare):
            yield Violation(path, _line(bare, m.start()), rule, why)
    if path.startswith(("engine/", "server/", "controller/")):
        for m in re.finditer(r"\bthrow\b", bare):
            yield Violation(path, _line(bare, m.start()), "throw", "errors are absl::Status")
    name = os.path.basename(path)
    if not re.fullmatch(r"[a-z0-9_]+\.(?:h|cc|cu|h\.in)", name):
        yield Violation(path, 1, "file-name", "names of files are snake_case")


def check_text(path, text):
    lines = text.count("\n") + (not text.endswith("\n") and bool(text))
    allowed = RATCHET.get(path, MAX_LINES)
    if lines > allowed:
        yield Violation(path, lines, "file-length", f"{lines} lines; at most {allowed}")
    if path in RATCHET and lines < RATCHET[path]:
        yield Violation(path, lines, "file-length",
                        f"it shrank to {lines} lines: so must its number in RATCHET")
    for m in re.finditer(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b(?!\(#\d+\))", text):
        yield Violation(path, _line(text, m.start()), "open-end",
                        f"'{m.group()}' without an issue, as in {m.group()}(#12)")


def cmake_commands(text):
    """(line, name, arguments) of each command; comments are dropped, quotes are stripped."""
    bare = re.sub(r"#[^\n]*", lambda m: " " * len(m.group()), text)
    for m in re.finditer(r"(\w+)\s*\(((?:[^()]|\([^()]*\))*)\)", bare):
        yield _line(bare, m.start()), m.group(1).lower(), m.group(2).replace('"', " ").split()


def check_cmake(path, text):
    for line, name, arguments in cmake_commands(text):
        joined = " ".join(arguments)
        if name == "file" and arguments and arguments[0].startswith("GLOB"):
            yield Violation(path, line, "glob", "sources are listed")
        if name in ("add_compile_options", "add_definitions", "link_libraries",
                    "include_directories", "link_directories", "add_link_options"):
            yield Violation(path, line, "global-flags", f"{name}: flags go through targets")
        if name == "set" and arguments and re.match(r"CMAKE_(?:CXX|CUDA|C)_FLAGS", arguments[0]):
            yield Violation(path, line, "global-flags", f"{arguments[0]}: flags go through targets")
        for flag in re.findall(r"-ffast-math|-Ofast|--use_fast_math|-ffinite-math-only", joined):
            yield Violation(path, line, "fast-math", f"{flag}: the -inf contract needs infinities")
        flags = ISA_FLAG.findall(joined)
        if flags and name == "set_source_files_properties":
            files = arguments[:arguments.index("PROPERTIES")] if "PROPERTIES" in arguments else []
            for file in files:
                if not ISA_SUFFIX.search(file):
                    yield Violation(path, line, "isa", f"{flags[0]} on {file}, whose name does not "
                                                       "say that it needs it")
        elif flags:
            yield Violation(path, line, "isa", f"{flags[0]} in {name}: only for single files")
    if path.startswith("engine/") and path.count("/") == 2:
        yield from check_engine_target(path, text)


def check_engine_target(path, text):
    """One target for each folder, which links what its row may include."""
    folder = os.path.dirname(path)
    target = folder.replace("/", "_")
    _, ours, packages = _row_of(folder)
    libraries = [(line, a) for line, name, a in cmake_commands(text)
                 if name in ("writescope_library", "add_library") and a]
    if [a[0] for _, a in libraries] != [target]:
        yield Violation(path, 1, "one-target", f"one library, named {target}; found "
                                               f"{[a[0] for _, a in libraries]}")
    links = []
    for line, name, arguments in cmake_commands(text):
        if name == "writescope_library" and "LINKS" in arguments:
            links += [(line, a) for a in arguments[arguments.index("LINKS") + 1:]]
        elif name == "target_link_libraries":
            links += [(line, a) for a in arguments[1:] if a not in ("PUBLIC", "PRIVATE", "INTERFACE")]
    for line, link in links:
        package = next((p for start, p in CMAKE_PACKAGES if link.startswith(start)), None)
        if link.startswith("engine_"):
            linked = link.replace("_", "/", 1)
            # A row may name single headers of a folder.
            if not (_matches(linked, ours) or any(o.startswith(linked + "/") for o in ours)):
                yield Violation(path, line, "link", f"{target} may not link {link}")
        elif package is None and link not in ("Threads::Threads", "writescope_flags"):
            yield Violation(path, line, "link", f"{target} links {link}: no known package")
        elif package is not None and package not in packages:
            yield Violation(path, line, "link", f"{target} may not link {link}, of {package}")


def check_sources_listed(root, paths):
    """Every .cc of the engine is in its folder's CMakeLists.txt: what is not built is not checked."""
    listed = {}
    for path in paths:
        if path.startswith("engine/") and path.endswith((".cc", ".cu")):
            folder = "/".join(path.split("/")[:2])
            if folder not in listed:
                cmake = os.path.join(root, folder, "CMakeLists.txt")
                text = _read(cmake) if os.path.isfile(cmake) else ""
                listed[folder] = {a for _, _, arguments in cmake_commands(text) for a in arguments}
            if path[len(folder) + 1:] not in listed[folder]:
                yield Violation(path, 1, "not-built", f"not in {folder}/CMakeLists.txt")


def check_tree(root):
    paths = source_files(root)
    violations = []
    for path in paths:
        try:
            text = _read(os.path.join(root, path))
        except UnicodeDecodeError as error:
            violations.append(Violation(path, 1, "encoding", f"not UTF-8: {error}"))
            continue
        if path.endswith(CODE_SUFFIXES):
            violations += check_includes(path, text)
            violations += check_code(path, text)
        violations += check_text(path, text)
        if os.path.basename(path) == "CMakeLists.txt" or path.endswith(".cmake"):
            violations += check_cmake(path, text)
    violations += check_sources_listed(root, paths)
    missing = [p for p in RATCHET if p not in paths]
    violations += [Violation(p, 1, "file-length", "gone: take it off RATCHET") for p in missing]
    return violations
