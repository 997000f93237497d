// Keys and search of the timeline page. Bokeh calls this when the page is drawn.

const FACTOR = 1.5  // of one zoom by key
const STEP = 0.2 // of the visible time, for one move by key

export default ({time, whole, sources, search, found}, _document, _data, {index}) => {
  const show = (start, end) => time.setv({start, end})
  const zoom = (factor) => {
    const middle = (time.start + time.end) / 2
    const half = factor * (time.end - time.start) / 2
    show(middle - half, middle + half)
  }
  const move = (part) => {
    const by = part * (time.end - time.start)
    show(time.start + by, time.end + by)
  }

  let matches = []  // [start, end] of each bar that matches, in order of time
  let at = -1

  const look = () => {
    const words = search.value_input.trim().toLowerCase()
    matches = []
    at = -1
    for (const source of sources) {
      const {name, what, start, end} = source.data
      const indices = []
      for (let i = 0; words && i < name.length; i++) {
        if (name[i].toLowerCase().includes(words) || what[i].toLowerCase().startsWith(words)) {
          indices.push(i)
          matches.push([start[i], end[i]])
        }
      }
      source.selected.indices = indices
    }
    matches.sort((one, other) => one[0] - other[0])
    found.text = words ? `${matches.length} bars` : ""
  }

  const go = (by) => {
    if (matches.length === 0) {
      return
    }
    at = at < 0 && by < 0 ? matches.length - 1 : (at + by + matches.length) % matches.length
    const [start, end] = matches[at]
    const middle = (start + end) / 2
    const half = Math.max((time.end - time.start) / 2, end - start)
    show(middle - half, middle + half)
    found.text = `${at + 1} of ${matches.length} bars`
  }

  search.properties.value_input.change.connect(look)

  const field = () => index.find_one(search).input_el
  const actions = {
    "+": () => zoom(1 / FACTOR),
    "=": () => zoom(1 / FACTOR),
    "-": () => zoom(FACTOR),
    "ArrowUp": () => zoom(1 / FACTOR),
    "ArrowDown": () => zoom(FACTOR),
    "ArrowLeft": () => move(-STEP),
    "ArrowRight": () => move(STEP),
    "0": () => show(...whole),
    "n": () => go(1),
    "p": () => go(-1),
    "/": () => field().focus(),
  }

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) {
      return
    }
    if (event.composedPath()[0] === field()) {
      if (event.key === "Enter") {
        go(event.shiftKey ? -1 : 1)
      } else if (event.key === "Escape") {
        field().blur()
      }
    } else if (event.key in actions) {
      event.preventDefault()
      actions[event.key]()
    }
  })
  document.body.dataset.ready = "true"
}
