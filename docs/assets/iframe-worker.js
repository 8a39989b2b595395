// Browsers refuse web workers to pages that are opened as files. There, the search runs in a hidden frame instead, which
// is given what the search expects of a worker: messages, and importScripts.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.ready = new Promise(resolve => {
        this.frame.onload = () => {
          const scope = this.frame.contentWindow
          scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
          scope.importScripts = (...urls) => urls.reduce((before, each) => before.then(() => load(scope, each)), Promise.resolve())
          load(scope, url).then(resolve)
        }
      })
      this.frame.srcdoc = "<!doctype html>"
      document.body.append(this.frame)
    }

    set onmessage(listener) {
      this.addEventListener("message", listener)
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }
}

function load(scope, url) {
  return new Promise((resolve, reject) => {
    const script = scope.document.createElement("script")
    script.onload = resolve
    script.onerror = reject
    script.src = new URL(url, location.href)
    scope.document.body.append(script)
  })
}
