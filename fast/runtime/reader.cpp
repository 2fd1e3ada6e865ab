// Tensors of Python read in C++, list by list (see reader.py).
//
// Every function answers no where it is not sure; Python then looks for itself. Nothing here makes
// a Python object of a gradient. Passes over a block of tensors touch one level of memory each, so
// that the processor waits for many cache lines at once instead of one after the other.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/core/TensorBase.h>

#include <cstdint>
#include <vector>

namespace {

using c10::TensorImpl;
using Weak = c10::weak_intrusive_ptr<TensorImpl, c10::UndefinedTensorImpl>;
constexpr Py_ssize_t BLOCK = 64;
constexpr char NOTES[] = "twinstep.notes";

Py_ssize_t place_of_impl = 0;  // bytes from the start of a tensor's Python object

// One gradient as it was: what it was made of, and in which order.
struct Kind {
    int64_t keys, dtype_and_order;
};

TensorImpl* impl_of(PyObject* tensor) {
    return *reinterpret_cast<TensorImpl**>(reinterpret_cast<char*>(tensor) + place_of_impl);
}

const at::TensorBase& gradient_of(c10::AutogradMetaInterface* meta) {
    // A Tensor has no members but those of its base.
    return reinterpret_cast<const at::TensorBase&>(meta->grad());
}

at::TensorBase& writable_gradient_of(c10::AutogradMetaInterface* meta) {
    return reinterpret_cast<at::TensorBase&>(meta->mutable_grad());
}

// Address of a tensor with storage, as Tensor.data_ptr() gives it; may throw as that does.
int64_t address_of(const TensorImpl* impl, c10::StorageImpl* storage) {
    auto* start = static_cast<char*>(storage->mutable_data());
    if (impl->numel() == 0) return 0;
    return reinterpret_cast<int64_t>(start + impl->storage_offset() * impl->itemsize());
}

Kind kind_of(const TensorImpl* impl) {
    const auto dtype = static_cast<int64_t>(c10::typeMetaToScalarType(impl->dtype()));
    return {static_cast<int64_t>(impl->key_set().raw_repr()),
            2 * dtype + (impl->is_contiguous() ? 1 : 0)};
}

PyObject** items_of(PyObject* list) { return reinterpret_cast<PyListObject*>(list)->ob_item; }

// Starts loading the lines of a tensor that are read: those of its storage, and of its kind.
void fetch(const TensorImpl* impl) {
    const char* start = reinterpret_cast<const char*>(impl);
    __builtin_prefetch(start);
    __builtin_prefetch(start + 128);
    __builtin_prefetch(start + sizeof(TensorImpl) - 1);
}

// Implementations and storages of a block; false where a tensor has no storage.
bool look(PyObject** items, Py_ssize_t count, TensorImpl** impls, c10::StorageImpl** storages) {
    for (Py_ssize_t i = 0; i < count; ++i) {
        impls[i] = impl_of(items[i]);
        fetch(impls[i]);
    }
    bool all = true;
    for (Py_ssize_t i = 0; i < count; ++i) {
        storages[i] = impls[i]->unsafe_storage().unsafeGetStorageImpl();
        __builtin_prefetch(storages[i]);
        all &= storages[i] != nullptr;
    }
    return all;
}

bool lie_at(TensorImpl** impls, c10::StorageImpl** storages, Py_ssize_t count,
            const int64_t* places) {
    bool same = true;
    for (Py_ssize_t i = 0; i < count; ++i) same &= address_of(impls[i], storages[i]) == places[i];
    return same;
}

bool read_block(PyObject** items, Py_ssize_t count, const int64_t* places, const Kind* kinds,
                int64_t* addresses, Kind* found) {
    TensorImpl* impls[BLOCK];
    c10::StorageImpl* storages[BLOCK];
    c10::AutogradMetaInterface* metas[BLOCK];
    if (!look(items, count, impls, storages)) return false;
    for (Py_ssize_t i = 0; i < count; ++i) {
        metas[i] = impls[i]->autograd_meta();
        if (metas[i] == nullptr) return false;
    }
    if (!lie_at(impls, storages, count, places)) return false;
    for (Py_ssize_t i = 0; i < count; ++i) {
        const at::TensorBase& grad = gradient_of(metas[i]);
        if (!grad.defined()) return false;
        impls[i] = grad.unsafeGetTensorImpl();
        fetch(impls[i]);
    }
    bool same = true;
    for (Py_ssize_t i = 0; i < count; ++i) {
        storages[i] = impls[i]->unsafe_storage().unsafeGetStorageImpl();
        __builtin_prefetch(storages[i]);
        const Kind kind = kind_of(impls[i]);
        if (found != nullptr) found[i] = kind;
        else same &= kind.keys == kinds[i].keys &&
                     kind.dtype_and_order == kinds[i].dtype_and_order;
        if (storages[i] == nullptr) return false;
    }
    for (Py_ssize_t i = 0; i < count; ++i) addresses[i] = address_of(impls[i], storages[i]);
    return same;
}

// Calls a function on blocks until one answers no; what torch throws is a no as well.
template <typename Function>
int in_blocks(Py_ssize_t count, Function function) {
    try {
        for (Py_ssize_t start = 0; start < count; start += BLOCK)
            if (!function(start, std::min(BLOCK, count - start))) return 0;
    } catch (...) {
        return 0;
    }
    return 1;
}

void free_notes(PyObject* capsule) {
    delete static_cast<std::vector<Weak>*>(PyCapsule_GetPointer(capsule, NOTES));
}

}  // namespace

extern "C" {

void set_place(Py_ssize_t place) { place_of_impl = place; }

// Whether two lists hold the same objects.
int same_objects(PyObject* list, PyObject* other) {
    const Py_ssize_t count = PyList_GET_SIZE(list);
    if (count != PyList_GET_SIZE(other)) return 0;
    return count == 0 || std::memcmp(items_of(list), items_of(other), count * sizeof(void*)) == 0;
}

// Whether tensors lie where they did.
int where_they_were(PyObject* tensors, const int64_t* places) {
    PyObject** items = items_of(tensors);
    return in_blocks(PyList_GET_SIZE(tensors), [&](Py_ssize_t start, Py_ssize_t count) {
        TensorImpl* impls[BLOCK];
        c10::StorageImpl* storages[BLOCK];
        return look(items + start, count, impls, storages) &&
               lie_at(impls, storages, count, places + start);
    });
}

// Addresses of the gradients of parameters that lie where they did; each is of the kind that it
// was, or the kinds are noted in `found`.
int read_gradients(PyObject* params, const int64_t* places, const Kind* kinds,
                   int64_t* addresses, Kind* found) {
    PyObject** items = items_of(params);
    return in_blocks(PyList_GET_SIZE(params), [&](Py_ssize_t start, Py_ssize_t count) {
        return read_block(items + start, count, places + start,
                          kinds == nullptr ? nullptr : kinds + start, addresses + start,
                          found == nullptr ? nullptr : found + start);
    });
}

// Whether parameters still have no gradient.
int without_gradients(PyObject* params) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(params); ++i) {
        c10::AutogradMetaInterface* meta = impl_of(PyList_GET_ITEM(params, i))->autograd_meta();
        if (meta != nullptr && gradient_of(meta).defined()) return 0;
    }
    return 1;
}

// Whether a dict has these keys and values, in this order.
int same_items(PyObject* dict, PyObject* keys, PyObject* values) {
    const Py_ssize_t count = PyList_GET_SIZE(keys);
    if (PyDict_Size(dict) != count) return 0;
    PyObject *key = nullptr, *value = nullptr;
    Py_ssize_t next = 0;
    for (Py_ssize_t i = 0; i < count; ++i)
        if (!PyDict_Next(dict, &next, &key, &value) || key != PyList_GET_ITEM(keys, i) ||
            value != PyList_GET_ITEM(values, i))
            return 0;
    return 1;
}

// Whether each dict has, under each name, the tensor that it had: dict by dict, name by name.
int same_entries(PyObject* dicts, PyObject* names, PyObject* tensors) {
    const Py_ssize_t count = PyList_GET_SIZE(dicts), width = PyTuple_GET_SIZE(names);
    for (Py_ssize_t start = 0; start < count; start += BLOCK) {
        const Py_ssize_t end = std::min(start + BLOCK, count);
        for (Py_ssize_t i = start; i < end; ++i) __builtin_prefetch(PyList_GET_ITEM(dicts, i));
        for (Py_ssize_t i = start; i < end; ++i)
            __builtin_prefetch(
                reinterpret_cast<PyDictObject*>(PyList_GET_ITEM(dicts, i))->ma_keys);
        for (Py_ssize_t i = start; i < end; ++i)
            for (Py_ssize_t name = 0; name < width; ++name) {
                PyObject* found = PyDict_GetItemWithError(PyList_GET_ITEM(dicts, i),
                                                          PyTuple_GET_ITEM(names, name));
                if (found == nullptr) {
                    PyErr_Clear();
                    return 0;
                }
                if (found != PyList_GET_ITEM(tensors, i * width + name)) return 0;
            }
    }
    return 1;
}

// Drops the gradients of parameters.
void drop_gradients(PyObject* params) {
    // What a gradient's end calls may change the list.
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(params); ++i) {
        c10::AutogradMetaInterface* meta = impl_of(PyList_GET_ITEM(params, i))->autograd_meta();
        if (meta != nullptr) at::TensorBase ended = std::move(writable_gradient_of(meta));
    }
}

// Notes which tensors are the gradients of parameters, without keeping them alive.
PyObject* note_gradients(PyObject* params) {
    const Py_ssize_t count = PyList_GET_SIZE(params);
    auto* notes = new std::vector<Weak>();
    notes->reserve(count);
    for (Py_ssize_t i = 0; i < count; ++i) {
        c10::AutogradMetaInterface* meta = impl_of(PyList_GET_ITEM(params, i))->autograd_meta();
        if (meta != nullptr && gradient_of(meta).defined())
            notes->emplace_back(gradient_of(meta).getIntrusivePtr());
        else
            notes->emplace_back(c10::intrusive_ptr<TensorImpl, c10::UndefinedTensorImpl>());
    }
    return PyCapsule_New(notes, NOTES, free_notes);
}

// Of each of the parameters that were noted, whether its gradient is the one that it had.
void still_noted(PyObject* capsule, PyObject* params, char* still) {
    const auto& notes = *static_cast<std::vector<Weak>*>(PyCapsule_GetPointer(capsule, NOTES));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(params); ++i) {
        c10::AutogradMetaInterface* meta = impl_of(PyList_GET_ITEM(params, i))->autograd_meta();
        // What is noted has not been freed as an object: nothing else can lie there.
        still[i] = meta != nullptr && gradient_of(meta).defined() &&
                   gradient_of(meta).unsafeGetTensorImpl() == notes[i]._unsafe_get_target();
    }
}

}  // extern "C"
