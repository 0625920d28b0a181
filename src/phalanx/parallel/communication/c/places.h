// What is known of a rank while it notes, and where in the code a collective was called from.
#pragma once
#include <Python.h>

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <structmember.h>
#include <time.h>
#include <unistd.h>

#define LARGEST UINT32_MAX

typedef struct {
  int64_t launched, arrived, waiting, left;
  uint32_t sequence, step;
  uint16_t group, site, user, nothing;
  uint8_t kind, dtype, phase, flags;
  uint32_t shape[4], padding;
  int64_t number;
} Record;

_Static_assert(sizeof(Record) == RECORD_SIZE, "a record is packed");
_Static_assert(offsetof(Record, flags) == FLAGS_AT, "a record is packed");

// From code, and a place in it, to a number; 0: not known. Code itself, at no place, to whose it is. Code is known by
// where it lies in memory, and `Places` keeps it there.
typedef struct {
  uintptr_t code;
  int at, value;
} Entry;

typedef struct {
  PyObject_HEAD
  Py_buffer memory, spent, waited, along, beside;
  PyObject *places, *sums, *clock, *groups;
  int64_t step, summed, since, count, had, queued, compiled;
  int64_t along_before[GROUPS], *sums_of_step;
  int phase, has_summed, processor;
  unsigned long main;
  Entry *entries;
  size_t room, used;
  int64_t covered[GROUPS];
  int further[SITES], in_vain[SITES];
} Notes;

// What was found of the frames from which collectives of a group and kind were last launched. Caches are cold where
// collectives are launched: what lies together here would be looked up in as many places.
#define FRAMES 4
typedef struct {
  uintptr_t code[FRAMES];
  int owner[FRAMES];
  int at, site;
} Path;

// Collectives of a group and kind, known by where these lie in memory, which a reference to each keeps there.
#define REPEATED 64
typedef struct {
  PyObject *group, *axis, *kind;
  int row, number;
  int64_t calls, sent;  // not counted yet in the dicts
  Path path;
} Repeated;

typedef struct {
  PyObject_HEAD
  Notes *notes;
  Py_buffer signs;
  Repeated repeated[REPEATED];
  PyObject *launching, *waited, *sent, *calls, *watchers, *wait_watchers;
  unsigned long main;
  char in_graph;
} Launches;

typedef struct {
  PyObject_HEAD
  Launches *launches;
  PyObject *axis, *kind, *since, *waits, *watched;
  int64_t record;
  int cuda, main;
} Launched;

static PyTypeObject NotesType, LaunchesType, LaunchedType;
static PyObject *kinds, *dtypes, *phases, *phase_names, *instant, *exit_stack, *getframe, *main_thread_of, *compiled_frames,
    *compile_seconds;
static int64_t item_sizes[256];
static PyTypeObject *tensor_type;
static PyObject *word_nbytes, *word_owner, *word_new_site, *word_new_group, *word_enter_context, *word_exit, *word_receive, *no_instant;

// An attribute of tensors. Of plain ones it is read without being looked up by name.
typedef struct {
  const char *name;
  PyObject *word;
  PyGetSetDef *direct;
} Attribute;

static Attribute shape_of = {"shape"}, dtype_of = {"dtype"}, is_cuda = {"is_cuda"};

static PyObject *read_attribute(PyObject *tensor, Attribute *attribute) {
  if (Py_TYPE(tensor) == tensor_type && attribute->direct)
    return attribute->direct->get(tensor, attribute->direct->closure);
  return PyObject_GetAttr(tensor, attribute->word);
}

static int find_attribute(Attribute *attribute) {
  PyObject *found = PyObject_GetAttrString((PyObject *)tensor_type, attribute->name);
  if (!found || !(attribute->word = PyUnicode_InternFromString(attribute->name))) return -1;
  if (Py_IS_TYPE(found, &PyGetSetDescr_Type)) attribute->direct = ((PyGetSetDescrObject *)found)->d_getset;
  return 0;  // what was found is kept
}

// Places in the code.

static size_t place_of(Notes *self, uintptr_t code, int at) {
  uint64_t mixed = ((uint64_t)(code >> 4) + (uint64_t)(unsigned)(at + 1) * 0x9E3779B97F4A7C15u) * 0xD6E8FEB86659FD93u;
  size_t place = (size_t)(mixed >> 32) & (self->room - 1);
  while (self->entries[place].code && (self->entries[place].code != code || self->entries[place].at != at))
    place = (place + 1) & (self->room - 1);
  return place;
}

static int known(Notes *self, uintptr_t code, int at) { return self->entries[place_of(self, code, at)].value; }

static int keep(Notes *self, uintptr_t code, int at, int value) {
  if (2 * (self->used + 1) > self->room) {
    Entry *before = self->entries;
    size_t room = self->room;
    Entry *after = PyMem_Calloc(2 * room, sizeof(Entry));
    if (!after) return PyErr_NoMemory(), -1;
    self->entries = after;
    self->room = 2 * room;
    for (size_t i = 0; i < room; ++i)
      if (before[i].code) after[place_of(self, before[i].code, before[i].at)] = before[i];
    PyMem_Free(before);
  }
  self->entries[place_of(self, code, at)] = (Entry){code, at, value};
  self->used++;
  return 0;
}

static int to_int(PyObject *found) {
  if (!found) return -1;
  long value = PyLong_AsLong(found);
  Py_DECREF(found);
  return (int)value;
}

static uintptr_t code_of(PyFrameObject *frame) {
  PyCodeObject *code = PyFrame_GetCode(frame);  // the frame keeps it
  Py_DECREF(code);
  return (uintptr_t)code;
}

static int owner_of(Notes *self, uintptr_t code) {
  int found = known(self, code, -1);
  if (found) return found;
  found = to_int(PyObject_CallMethodObjArgs(self->places, word_owner, (PyObject *)code, NULL));
  if (found < 0 || keep(self, code, -1, found) < 0) return -1;
  return found;
}

static int known_site(Notes *self, PyFrameObject *frame) { return known(self, code_of(frame), PyFrame_GetLasti(frame)); }

static int site_of(Notes *self, PyFrameObject *frame) {
  int found = known_site(self, frame);
  if (found) return found;
  found = to_int(PyObject_CallMethodObjArgs(self->places, word_new_site, (PyObject *)frame, NULL));
  if (found > 0 && keep(self, code_of(frame), PyFrame_GetLasti(frame), found) < 0) return -1;
  return found;
}

static PyFrameObject *above(PyFrameObject *frame) {
  PyFrameObject *back = PyFrame_GetBack(frame);
  Py_DECREF(frame);
  return back;
}

// Frame by frame; takes over the reference to the frame.
static int search(Notes *self, PyFrameObject *frame, int *site, int *user) {
  int here = 0, depth = 0, begun = 0;
  for (int i = 0; i < DEEPEST && frame; ++i, ++depth) {
    int owner = owner_of(self, code_of(frame));
    if (owner < 0) goto failed;
    if (owner == USERS) {
      int found = site_of(self, frame);
      if (found < 0) goto failed;
      self->further[here] = here ? depth - begun : 0;
      *site = here ? here : found;
      *user = found;
      Py_DECREF(frame);
      return 0;
    }
    if (owner == ROOT) break;
    if (!here && owner == OTHERS) {
      here = site_of(self, frame);
      begun = depth;
      if (here < 0) goto failed;
    }
    frame = above(frame);
  }
  Py_XDECREF(frame);
  self->in_vain[here]++;
  *site = here;
  *user = 0;
  return 0;
failed:
  Py_DECREF(frame);
  return -1;
}

// Whose the code of a frame is that lies so deep.
static int owner_along(Notes *self, Path *path, int depth, uintptr_t code) {
  if (depth < FRAMES && path->code[depth] == code) return path->owner[depth];
  int owner = owner_of(self, code);
  if (owner >= 0 && depth < FRAMES) {
    path->code[depth] = code;
    path->owner[depth] = owner;
    path->site = 0;
  }
  return owner;
}

static int site_along(Notes *self, Path *path, int depth, PyFrameObject *frame) {
  int at = PyFrame_GetLasti(frame);
  if (depth >= FRAMES) return known_site(self, frame);
  if (!path->site || path->at != at) {
    path->site = known_site(self, frame);
    path->at = at;
  }
  return path->site;
}

// Where the communicator was called, and the user's line that led there.
static int called(Notes *self, Path *path, int *site, int *user) {
  PyFrameObject *frame = PyEval_GetFrame();
  int depth = 0;
  *site = *user = 0;
  Py_XINCREF(frame);
  for (; frame; frame = above(frame), ++depth) {
    int owner = owner_along(self, path, depth, code_of(frame));
    if (owner < 0) {
      Py_DECREF(frame);
      return -1;
    }
    if (owner != OURS) break;
  }
  if (!frame) return 0;
  int here = site_along(self, path, depth, frame), further = self->further[here];
  if (here && further) {
    PyObject *deep = PyLong_FromLong(depth + further);
    PyObject *found = deep ? PyObject_CallOneArg(getframe, deep) : NULL;
    Py_XDECREF(deep);
    if (found) {
      int there = known_site(self, (PyFrameObject *)found);
      int theirs = there && known(self, code_of((PyFrameObject *)found), -1) == USERS;
      Py_DECREF(found);
      if (theirs) {
        *site = here;
        *user = there;
        Py_DECREF(frame);
        return 0;
      }
    } else if (PyErr_ExceptionMatches(PyExc_ValueError)) {
      PyErr_Clear();  // the stack is not so deep
    } else {
      Py_DECREF(frame);
      return -1;
    }
  } else if (self->in_vain[here] >= TRIES) {
    *site = here;
    Py_DECREF(frame);
    return 0;
  }
  return search(self, frame, site, user);
}
